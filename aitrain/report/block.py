"""A few lines at the bottom of a terminal that are drawn again and again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text


@dataclass
class Block:
    """What changes is drawn over itself; what is printed goes above it and stays."""

    console: Console
    drawn: list[int] = field(default_factory=list)
    """Widths of the lines on the screen, the cursor being at the end of the last one."""

    def draw(self, lines: Sequence[Text]) -> None:
        """These lines instead of those that are there; as many as the terminal is high enough for."""
        lines = lines[: max(1, self.console.height - 1)]
        self._write(self._erasing() + self._rendered(lines))
        self.drawn = [line.cell_len for line in lines]

    def print_above(self, text: Text) -> None:
        """A line that stays; the caller draws the block anew."""
        self.erase()
        self.console.print(text)

    def erase(self) -> None:
        """Take it away."""
        self._write(self._erasing())
        self.drawn = []

    def leave(self) -> None:
        """Let it stand as it is, and go on below."""
        if self.drawn:
            self._write("\n")
        self.drawn = []

    def _erasing(self) -> str:
        """A terminal that became narrower has broken the lines that were too wide for it."""
        if not self.drawn:
            return ""
        width = max(1, self.console.width)
        rows = sum(max(1, -(-length // width)) for length in self.drawn)
        return (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\r\x1b[J"

    def _rendered(self, lines: Sequence[Text]) -> str:
        with self.console.capture() as captured:
            self.console.print(Text("\n").join(lines), end="", no_wrap=True, overflow="crop")
        return captured.get()

    def _write(self, text: str) -> None:
        """At once, so that no half of it is seen."""
        self.console.file.write(text)
        self.console.file.flush()


def can_be_drawn_over(console: Console) -> bool:
    """Whether somebody watches a terminal that can move its cursor; colours wanted in a pipe do not make it one."""
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    is_watched = console.file.isatty() if hasattr(console.file, "isatty") else False
    return is_watched and console.is_interactive and not (console.is_dumb_terminal or console.quiet or is_ci)
