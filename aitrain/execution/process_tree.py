"""A program that is ended together with all processes that it has started, however it or aitrain ends.

A supervisor runs between aitrain and the program: this file, without site-packages, so that nothing in the user's can
break it: `python -I -S process_tree.py SECONDS COMMAND...`. Its standard input is a socket. It reads numbers of signals
for the program; SIGKILL is for all processes; 0, or the end of the connection, means that the program has SECONDS to
end by itself. It ends after the last process, with the program's exit code or by its signal.
"""

import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn, cast

POLL = 0.05
"""Seconds between two looks of the supervisor at what has ended and at what it is asked for."""
PATIENCE_WITH_ORPHANS = 3.0
"""Seconds for processes that are left after the program has ended."""
LAST_PATIENCE = 10.0
"""Seconds to wait after SIGKILL; a process that still exists then hangs in a driver, and cannot be ended."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


@contextmanager
def on_stop_signals(handler: Callable[..., object]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM; no-op outside the main thread, which alone can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


class ProcessTree:
    """A program in a session of its own, and all processes that it starts, also daemons: none is left when it ends."""

    def __init__(self, command: list[str], patience: float = 0.0, **options: Any) -> None:
        """Start it, with options of subprocess.Popen. `patience`: the seconds that it gets to end by itself if aitrain
        is killed, or asks it to end."""
        self._socket, theirs = socket.socketpair()
        supervisor = [sys.executable, "-I", "-S", __file__, str(patience), *command]
        with theirs:
            self._supervisor: subprocess.Popen[bytes] = subprocess.Popen(
                supervisor, stdin=theirs.fileno(), start_new_session=True, **options
            )
        self.stdout = cast(IO[bytes], self._supervisor.stdout)
        """What the program writes, if `stdout` was subprocess.PIPE."""

    def poll(self) -> int | None:
        """The program's exit code, negative for a signal, once all its processes have ended; else None."""
        return self._supervisor.poll()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of all processes; returns the program's exit code.

        Raises:
            subprocess.TimeoutExpired: they have not ended within these seconds.
        """
        code = self._supervisor.wait(seconds)
        self._socket.close()
        return code

    def send(self, number: int) -> None:
        """Send a signal to the program, and SIGKILL to all that it has started as well. No-op if it has ended."""
        with suppress(OSError):
            self._socket.send(bytes([number]))

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting. Closing the socket is not enough: a forked process may hold it, too."""
        self.send(0)

    def close(self) -> int:
        """Kill the program and all that it has started, and wait for the end; returns the program's exit code."""
        self.send(signal.SIGKILL)
        try:
            return self.wait(LAST_PATIENCE + PATIENCE_WITH_ORPHANS)
        except subprocess.TimeoutExpired:  # it was halted
            self._supervisor.kill()
            return self.wait()


# -- in the supervisor


def main(patience: str, *command: str) -> None:
    """Run one program in a new session until it has ended, aitrain requests its end, or aitrain has ended. Then SIGTERM
    to the program, which ends its own processes; SIGTERM to those that are left; SIGKILL to all. On Linux, orphans
    become children of this process."""
    parent, is_heard, code = os.getppid(), True, None
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # those that a scheduler sends to all are the program's own, too
        signal.signal(ignored, lambda *_: None)  # not SIG_IGN: the program would inherit that
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # it has those of `pass_fds`
        start_new_session=True,
        preexec_fn=end_with_parent,  # if the supervisor is killed
    )
    stage, end, asked = "running", math.inf, set[int]()
    while True:
        numbers = b""
        if select.select([0] * is_heard, [], [], POLL)[0]:
            with suppress(OSError):
                numbers = os.read(0, 1024)
            is_heard = bool(numbers)
        is_asked = 0 in numbers or not is_heard or os.getppid() != parent
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program.pid:
                    code = program.returncode = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:  # none is left
            end_as(code)
        for number in numbers:
            if code is None and number not in (0, signal.SIGKILL):
                os.kill(program.pid, number)
        now = time.monotonic()
        if stage == "running" and code is None and is_asked:
            os.kill(program.pid, signal.SIGTERM)
            stage, end = "asked", now + float(patience)
        if stage in ("running", "asked") and (code is not None or now >= end):
            stage, end = "orphans", now + PATIENCE_WITH_ORPHANS
        if signal.SIGKILL in numbers or (stage == "orphans" and now >= end):
            stage, end = "killed", now + LAST_PATIENCE
        if stage == "orphans":
            asked |= send_to_all(program.pid, signal.SIGTERM, asked)
        if stage == "killed":
            send_to_all(program.pid, signal.SIGKILL)
            if now >= end:
                end_as(code)


def end_as(code: int | None) -> NoReturn:
    """End with an exit code, or by the signal of a negative one, without a core dump; None: the program hangs."""
    code = -signal.SIGKILL if code is None else code
    if code < 0:
        set_process(PR_SET_DUMPABLE, 0)
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def send_to_all(program: int, number: int, but: Collection[int] = ()) -> set[int]:
    """Send a signal to the program's process group, and to the processes that have left it, but for some; returns
    their ids. When one ends, those that it has started become children of this process."""
    children = list[str]()
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # Linux only
        children = file.read().split()
    pids = {int(pid) for pid in children} - set(but)
    for send, pid in ((os.killpg, program), *((os.kill, pid) for pid in pids)):
        if pid not in but:
            with suppress(ProcessLookupError, PermissionError):
                send(pid, number)
    return pids | {program}


def set_process(option: int, value: int) -> None:
    """Set one of Linux's process options; other systems rely on the socket alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent() -> None:
    """Have this process asked to end when the one that started it ends, also if that is killed."""
    set_process(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
