"""Shows the answers of one or two models in the terminal while they come: side by side, or one below the other.

Text of models is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.terminal import can_be_drawn_over

SIDE_BY_SIDE = 70
"""Columns of a terminal from which two answers are shown side by side."""
DRAW_AT_MOST = 0.05
"""Minimum seconds between two redraws."""


class ChatView:
    """The answers to one question. `titles` are the models' names with what they are."""

    def __init__(self, console: Console, titles: Mapping[str, str]) -> None:
        self.console = console
        self.parts = {name: [Text(escape_controls(title), "bold")] for name, title in titles.items()}
        self._answers: dict[str, Text] = {}
        self._live = Live(console=console, get_renderable=lambda: self, auto_refresh=False, transient=True)
        self._last_drawn = 0.0

    def answer(self, name: str, text: str) -> None:
        """Show the text so far of a model's present answer."""
        if name not in self._answers:
            self._answers[name] = Text()
            self.parts[name].append(self._answers[name])
        self._answers[name].plain = escape_controls(text)
        self._draw()

    def note(self, name: str, text: str, style: str) -> None:
        """Show a line below the model's answer, such as why it was cut off."""
        self.parts[name].append(Text(escape_controls(text), style))
        self._draw()

    def finish(self) -> None:
        """Print the answers in full; they then scroll with the terminal."""
        self._live.stop()
        self.console.print(self._columns())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last lines, as many as the terminal has room for."""
        for line in console.render_lines(self._columns(), options.update(height=None))[2 - console.height :]:
            yield from line
            yield Segment.line()

    def _columns(self) -> RenderableType:
        columns = [Group(*parts) for parts in self.parts.values()]
        if len(columns) < 2 or self.console.width < SIDE_BY_SIDE:
            return Group(*columns)
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in columns:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*columns)
        return table

    def _draw(self) -> None:
        if can_be_drawn_over(self.console) and time.monotonic() - self._last_drawn > DRAW_AT_MOST:
            self._last_drawn = time.monotonic()
            self._live.start()
            self._live.refresh()
