"""A program that is ended together with all processes that it has started, however it or aitrain ends.

A supervisor runs between aitrain and the program: this file, without site-packages, so that nothing in the user's can
break it: `python -I -S process_tree.py SECONDS COMMAND...`. Its standard input is a socket. It reads numbers of signals
for the program; SIGKILL is for all processes; 0, or the end of the connection, means that the program has SECONDS to
end by itself. It writes the program's exit code, and ends after the last process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

POLL = 0.5
PATIENCE_WITH_ORPHANS = 3.0
"""Seconds for processes that are left after the program has ended."""
LAST_PATIENCE = 10.0
"""Seconds to wait after SIGKILL; a process that still exists then hangs in a driver, and cannot be ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


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

    def __init__(
        self,
        command: list[str],
        patience: float = 0.0,
        *,
        env: Mapping[str, str],
        stderr: int | IO[bytes] | IO[str],
        stdout: int | IO[bytes] | None = None,
        cwd: str | None = None,
        pass_fds: Collection[int] = (),
    ) -> None:
        """Start it, with these open files. `patience`: the seconds that it gets to end by itself if aitrain is killed,
        or asks it to end. Without `stdout`, its output goes to `stderr`."""
        self._code: int | None = None
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(patience), *command],
                stdin=theirs.fileno(),
                stdout=stderr if stdout is None else stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    @property
    def stdout(self) -> IO[bytes]:
        """What the program writes, if `stdout` was subprocess.PIPE."""
        assert self._supervisor.stdout is not None
        return self._supervisor.stdout

    def poll(self) -> int | None:
        """The program's exit code, negative for a signal, once all its processes have ended; else None."""
        return None if self._supervisor.poll() is None else self.wait_for_program()

    def wait_for_program(self) -> int:
        """Wait for the end of the program; returns its exit code. What it has started may still be there."""
        with self._lock:
            if self._code is None:
                said = self._socket.recv(16)
                self._code = int(said) if said else self._supervisor.wait()  # the supervisor was killed
            return self._code

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of all processes; returns the program's exit code.

        Raises:
            subprocess.TimeoutExpired: they have not ended within these seconds.
        """
        self._supervisor.wait(seconds)
        code = self.wait_for_program()
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


class Supervisor:
    """One program, in a new session, and all its descendants; on Linux, orphans become children of this process."""

    def __init__(self, command: list[str], patience: float) -> None:
        self.patience = patience
        self.parent = os.getppid()
        self.changed = threading.Condition()  # protects the attributes below, and that no id is reused while it is held
        self.code: int | None = None
        self.is_any_left = True
        self.is_asked = self.is_killed = False
        """Whether aitrain wants the end of all, and at once."""
        set_process(PR_SET_CHILD_SUBREAPER, 1)
        self.program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            close_fds=False,  # it has those of `pass_fds`
            start_new_session=True,
            preexec_fn=end_with_parent,  # if the supervisor is killed
        )
        signal.signal(signal.SIGTERM, lambda *_: self.ask())
        for work in (self.reap, self.listen):
            threading.Thread(target=work, daemon=True).start()

    def ask(self, is_killed: bool = False) -> None:
        """Let all processes end."""
        with self.changed:
            self.is_asked = True
            self.is_killed |= is_killed
            self.changed.notify_all()

    def reap(self) -> None:
        """Wait for the ends of descendants; that of the program goes to the parent process."""
        with suppress(ChildProcessError):  # there are no more
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT):
                with self.changed:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == self.program.pid:
                        self.code = self.program.returncode = os.waitstatus_to_exitcode(status)
                        with suppress(OSError):  # aitrain is gone
                            os.write(0, str(self.code).encode())
                    self.changed.notify_all()
        with self.changed:
            self.is_any_left = False
            self.changed.notify_all()

    def listen(self) -> None:
        """Do what aitrain requests, to its end."""
        with suppress(OSError):
            while numbers := os.read(0, 1024):
                with self.changed:
                    for number in numbers:
                        if number in (0, signal.SIGKILL):
                            self.ask(is_killed=number == signal.SIGKILL)
                        elif self.code is None:
                            os.kill(self.program.pid, number)
        self.ask()

    def run(self) -> None:
        """Wait until the program has ended, aitrain requests its end, or aitrain has ended. Then SIGTERM to the
        program, which ends its own processes; SIGTERM to those that are left; SIGKILL to all."""
        with self.changed:
            while self.code is None and not self.is_asked and os.getppid() == self.parent:
                self.changed.wait(POLL)
            if self.code is None and not self.is_killed:
                os.kill(self.program.pid, signal.SIGTERM)
                self.changed.wait_for(lambda: self.code is not None or self.is_killed, min(self.patience, 1e9))
            asked = set[int]()
            end = time.monotonic() + PATIENCE_WITH_ORPHANS
            while self.is_any_left and not self.is_killed and (left := end - time.monotonic()) > 0:
                asked |= self.send(signal.SIGTERM, asked)
                self.changed.wait(left)
            end = time.monotonic() + LAST_PATIENCE
            while self.is_any_left and time.monotonic() < end:
                self.send(signal.SIGKILL)
                self.changed.wait(0.005)

    def send(self, number: int, but: Collection[int] = ()) -> set[int]:
        """Send a signal to the program's process group, and to the processes that have left it, but for some; returns
        their ids. When one ends, those that it has started become children of this process."""
        children = list[str]()
        with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # Linux only
            children = file.read().split()
        pids = {int(pid) for pid in children} - set(but)
        for send, pid in ((os.killpg, self.program.pid), *((os.kill, pid) for pid in pids)):
            if pid not in but:
                with suppress(ProcessLookupError, PermissionError):
                    send(pid, number)
        return pids | {self.program.pid}


def set_process(option: int, value: int) -> None:
    """Set one of Linux's process options; other systems rely on the socket alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent() -> None:
    """Have this process asked to end when the one that started it ends, also if that is killed."""
    set_process(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(patience: str, *command: str) -> None:
    """Run one program."""
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN: the program would inherit that
    Supervisor(list(command), float(patience)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
