"""A block of lines at the bottom of a terminal that is redrawn in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from aitrain.ui.loading import is_ci


@dataclass
class Block:
    """Lines that are redrawn in place, below the text that is printed."""

    console: Console
    drawn: list[int] = field(default_factory=list)
    """Widths of the lines on the screen; the cursor is at the end of the last one."""

    def draw(self, lines: Sequence[Text]) -> None:
        """Replace the lines on the screen; lines beyond the height of the terminal are left out."""
        lines = lines[: max(1, self.console.height - 1)]
        with self.console.capture() as captured:
            self.console.print(Text("\n").join(lines), end="", no_wrap=True, overflow="crop")
        self._write(self._erasing() + captured.get())
        self.drawn = [line.cell_len for line in lines]

    def print_above(self, text: Text) -> None:
        """Erase the block and print text; the caller draws the block again."""
        self.erase()
        self.console.print(text)

    def erase(self) -> None:
        """Remove the block."""
        self._write(self._erasing())
        self.drawn = []

    def leave(self) -> None:
        """Leave the block on the screen, with the cursor below it."""
        if self.drawn:
            self._write("\n")
        self.drawn = []

    def _erasing(self) -> str:
        """Control codes that erase the block, whose lines are wrapped if the terminal has become narrower."""
        if not self.drawn:
            return ""
        width = max(1, self.console.width)
        rows = sum(max(1, -(-length // width)) for length in self.drawn)
        return (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\r\x1b[J"

    def _write(self, text: str) -> None:
        """Write in one piece, so that nothing flickers."""
        self.console.file.write(text)
        self.console.file.flush()


def can_be_drawn_over(console: Console) -> bool:
    """Whether output goes to a terminal that can move its cursor, outside of CI; not for a pipe with FORCE_COLOR."""
    is_watched = console.file.isatty() if hasattr(console.file, "isatty") else False
    return is_watched and console.is_interactive and not (console.is_dumb_terminal or console.quiet or is_ci())
