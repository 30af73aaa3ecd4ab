"""A command on a pseudo terminal of 80 columns: what it shows, and what is typed when."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 120.0
"""Seconds until an expected text must have appeared; only a command that hangs takes so long."""
STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass
class Terminal:
    """A running command; `shown` is what it has printed so far, without colours."""

    process: subprocess.Popen[bytes]
    master: int
    raw: str = ""

    @property
    def shown(self) -> str:
        return STYLES.sub("", self.raw).replace("\r", "")

    def type(self, text: str) -> None:
        """Type the text; \\x03 is Ctrl-C, \\x04 Ctrl-D."""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, count: int = 1) -> None:
        """Read until the text has been shown so many times."""
        deadline = time.monotonic() + PATIENCE
        while self.shown.count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} does not come:\n{self.shown}"
            if not self._read():
                raise AssertionError(f"the command has ended without {text!r}:\n{self.shown}")

    def interrupt(self) -> int:
        """Press Ctrl-C until the command has ended; returns the exit code. Once is not always enough: Python's readline
        overlooks a signal that comes while it handles a key, until the next one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, f"Ctrl-C does not end it:\n{self.shown}"
            with suppress(OSError):  # it has ended
                self.type("\x03")
            while select.select([self.master], [], [], 1.0)[0]:
                if not self._read():
                    return self.process.wait(PATIENCE)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], PATIENCE)
        assert ready, f"nothing more comes:\n{self.shown}"
        try:
            self.raw += os.read(self.master, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            return False
        return True


def start(folder: Path, arguments: Sequence[str]) -> Terminal:
    """Start `aitrain ...` in a folder, as the foreground process of a new terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color"} | {"HF_HUB_OFFLINE": "1"}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        variables.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "aitrain", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=variables,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    return Terminal(process, master)


def _take_terminal() -> None:
    """Make the terminal this process's own; Ctrl-C works even if a shell's background job runs the tests."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
