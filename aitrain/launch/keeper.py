"""Stands between aitrain and its vLLM server: ends the server and all that it started, whatever ends aitrain.

Run as a file, without site-packages: `python -I -S keeper.py SECONDS COMMAND ...`. It reads its standard input, a pipe
that only aitrain writes to: anything that arrives, or its end, says that the server must go. SECONDS is what the
server gets to go by itself.
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
"""Seconds that processes get which the server did not end before it went."""
LAST_PATIENCE = 10.0
"""Seconds after SIGKILL; what is still there then hangs in a driver, and nobody can end it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Keeper:
    """One server, in a session of its own, and all its descendants."""

    def __init__(self, command: list[str], patience: float) -> None:
        self.patience = patience
        self.parent = os.getppid()
        self.code: int | None = None
        _set_process(PR_SET_CHILD_SUBREAPER, 1)
        self.server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_the_keeper
        )

    def watch(self) -> None:
        """Until the server has ended, aitrain asks for it, or aitrain is gone."""
        while self.code is None and os.getppid() == self.parent:
            if select.select([0], [], [], POLL)[0]:
                return
            self.is_any_left()

    def end(self) -> None:
        """Ask the server to go, which ends its own first; then the rest of its group; then kill what is left."""
        if self.is_any_left() and self.code is None:
            os.kill(self.server.pid, signal.SIGTERM)
            _wait(self.patience, lambda: self.is_any_left() and self.code is None)
        self._send(signal.SIGTERM)
        _wait(PATIENCE_WITH_ORPHANS, self.is_any_left)
        _wait(LAST_PATIENCE, self._kill)

    def is_any_left(self) -> bool:
        """Whether a descendant lives; takes note of those that ended. Orphans are handed to us, where Linux can."""
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
        """All in the group, and those who left it, once they are ours; whether there was any."""
        self._send(signal.SIGKILL)
        for pid in _children():
            os.kill(pid, signal.SIGKILL)  # not collected yet, so the id is still its own
        return self.is_any_left()

    def _send(self, number: int) -> bool:
        """To the server's group; whether there is one."""
        try:
            os.killpg(self.server.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _wait(seconds: float, goes_on: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while goes_on() and time.monotonic() < deadline:
        time.sleep(0.05)


def _children() -> list[int]:
    """Of this process, which has one thread; none where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _set_process(option: int, value: int) -> None:
    """One of Linux's own settings of a process; elsewhere the pipe alone must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_the_keeper() -> None:
    """In the server before it starts: should somebody kill the keeper, the server is asked to go."""
    _set_process(PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main(patience: str, *command: str) -> int:
    """Keep one server. Returns its exit code, 128 + n where signal n ended it."""
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN: the server would inherit that
    keeper = Keeper(list(command), float(patience))
    signal.signal(signal.SIGTERM, _leave)
    try:
        keeper.watch()
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)
        keeper.end()
    return 0 if keeper.code is None else keeper.code if keeper.code >= 0 else 128 - keeper.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
