"""Runs a vLLM server as a child process; ends it and all its descendants when aitrain ends, however that happens.

Run as a file, without site-packages: `python -I -S supervisor.py SECONDS COMMAND ...`. Standard input is a pipe that
only aitrain writes to: any byte, or the end of the pipe, means that the server must end. SECONDS is the time that the
server gets to end by itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

POLL = 0.2
PATIENCE_WITH_ORPHANS = 3.0
"""Seconds for processes that are left after the server has ended."""
LAST_PATIENCE = 10.0
"""Seconds to wait after SIGKILL; a process that still exists then hangs in a driver, and cannot be ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Supervisor:
    """One server, in a new session, and all its descendants."""

    def __init__(self, command: list[str], patience: float) -> None:
        self.patience = patience
        self.parent = os.getppid()
        self.code: int | None = None
        _set_process(PR_SET_CHILD_SUBREAPER, 1)
        self.server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_the_supervisor
        )

    def watch(self) -> None:
        """Wait until the server has ended, aitrain requests its end, or aitrain has ended."""
        while self.code is None and os.getppid() == self.parent:
            if select.select([0], [], [], POLL)[0]:
                return
            self.is_any_left()

    def end(self) -> None:
        """SIGTERM to the server, which ends its own processes; SIGTERM to its group; SIGKILL to what is left."""
        if self.is_any_left() and self.code is None:
            os.kill(self.server.pid, signal.SIGTERM)
            _wait(self.patience, lambda: self.is_any_left() and self.code is None)
        self._send(signal.SIGTERM)
        _wait(PATIENCE_WITH_ORPHANS, self.is_any_left)
        _wait(LAST_PATIENCE, self._kill)

    def is_any_left(self) -> bool:
        """Reap descendants that have ended; returns whether one is left. On Linux, orphans become children of this
        process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self._send(0)
            if pid == 0:
                return True
            if pid == self.server.pid:
                self.code = self.server.returncode = os.waitstatus_to_exitcode(status)

    def _kill(self) -> bool:
        """SIGKILL to the group and to orphans that left it; returns whether any descendant is left."""
        self._send(signal.SIGKILL)
        for pid in _children():
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is not reused
        return self.is_any_left()

    def _send(self, number: int) -> bool:
        """Send a signal to the server's process group; returns whether there is one."""
        try:
            os.killpg(self.server.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _wait(seconds: float, is_needed: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while is_needed() and time.monotonic() < deadline:
        time.sleep(0.05)


def _children() -> list[int]:
    """Ids of the children of this process, from /proc, as psutil is in site-packages; empty on other systems."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _set_process(option: int, value: int) -> None:
    """Set one of Linux's process options; other systems rely on the pipe alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_the_supervisor() -> None:
    """Runs in the server before it starts: the server gets SIGTERM if the supervisor is killed."""
    _set_process(PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main(patience: str, *command: str) -> int:
    """Run one server. Returns its exit code, 128 + n if signal n ended it."""
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN: the server would inherit that
    supervisor = Supervisor(list(command), float(patience))
    signal.signal(signal.SIGTERM, _leave)
    try:
        supervisor.watch()
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)
        supervisor.end()
    return 0 if supervisor.code is None else supervisor.code if supervisor.code >= 0 else 128 - supervisor.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
