"""A command on a pseudo terminal of 80 columns: what it shows, and what is typed when."""

from __future__ import annotations

import os
import pty
import re
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass
class Terminal:
    """A running command; `shown` is what it has printed so far, without colours."""

    pid: int
    master: int
    raw: str = ""

    @property
    def shown(self) -> str:
        return STYLES.sub("", self.raw).replace("\r", "")

    def type(self, text: str) -> None:
        """Type the text."""
        os.write(self.master, text.encode())

    def wait_for(self, text: str | None) -> None:
        """Read until the text has been shown; None: to the end."""
        while text is None or text not in self.shown:
            try:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                assert text is None, f"the command has ended without {text!r}:\n{self.shown}"
                return

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        self.wait_for(None)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(folder: Path, arguments: Sequence[str]) -> Terminal:
    """Start `aitrain ...` in a folder, as the foreground process of a new terminal."""
    variables = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        variables.pop(name, None)
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "aitrain", *arguments], variables)
    termios.tcsetwinsize(master, (24, 80))
    return Terminal(pid, master)
