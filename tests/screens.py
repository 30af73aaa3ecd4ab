"""Terminals for tests: a real emulator that shows what a person would see."""

from __future__ import annotations

import io

import pyte
from rich.console import Console


class Terminal(io.StringIO):
    """A file that is a terminal: what is written to it is shown by `screen`."""

    encoding = "utf-8"

    def __init__(self, width: int = 80, height: int = 24) -> None:
        super().__init__()
        self.screen = pyte.Screen(width, height)
        self.screen.set_mode(pyte.modes.LNM)  # as the terminal's driver does
        self.stream = pyte.Stream(self.screen)
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        self.stream.feed(text)
        return len(text)

    @property
    def shown(self) -> list[str]:
        """The lines on the screen, without the empty ones below."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().splitlines()

    def console(self) -> Console:
        """Rich's, as wide and high as the screen is now."""
        size = {"width": self.screen.columns, "height": self.screen.lines}
        return Console(file=self, force_terminal=True, highlight=False, _environ={"TERM": "xterm-256color"}, **size)
