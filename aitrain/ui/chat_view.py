"""Shows the answers of one or two models in the terminal while they come: side by side, or one below the other.

Text of models and environments is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from aitrain.ui.block import Block, can_be_drawn_over
from aitrain.ui.escape_controls import escape_controls

SIDE_BY_SIDE = 70
"""Columns of a terminal from which two answers are shown side by side."""
DRAW_AT_MOST = 0.05
"""Minimum seconds between two redraws."""
GAP = " │ "


class ChatView:
    """The answers to one question. `titles` are the models' names with what they are."""

    def __init__(self, console: Console, titles: Mapping[str, str]) -> None:
        self.console, self.titles = console, titles
        self.parts: dict[str, list[Text]] = {name: [] for name in titles}
        self._answers: dict[str, Text] = {}
        self._block = Block(console) if can_be_drawn_over(console) else None
        self._last_drawn = 0.0

    def answer(self, name: str, text: str) -> None:
        """Show the text so far of a model's present answer."""
        if name not in self._answers:
            self._answers[name] = Text()
            self.parts[name].append(self._answers[name])
        self._answers[name].plain = escape_controls(text)
        self._draw()

    def said(self, name: str, messages: Sequence[Mapping[str, object]]) -> None:
        """Show what the environment says, and begin a new answer of the model."""
        for message in messages:
            self.parts[name].append(as_text(message))
        self._answers.pop(name, None)
        self._draw()

    def note(self, name: str, text: str, style: str) -> None:
        """Show a line below the model's answer, such as its score."""
        self.parts[name].append(Text(escape_controls(text), style))
        self._draw()

    def finish(self) -> None:
        """Print the answers in full; they then scroll with the terminal."""
        if self._block is not None:
            self._block.erase()
        for line in self.lines():
            self.console.print(line, soft_wrap=True)

    def lines(self) -> list[Text]:
        """The lines of the answers, none wider than the terminal."""
        width, names = self.console.width, list(self.titles)
        if len(names) < 2 or width < SIDE_BY_SIDE:
            return [line for name in names for line in self._column(name, width)]
        wide = (width - len(GAP)) // 2
        gap = Text(GAP if not self.console.options.ascii_only else " | ", "dim")
        pairs = zip_longest(*(self._column(name, wide) for name in names), fillvalue=Text())
        return [joined(left, right, wide, gap) for left, right in pairs]

    def _column(self, name: str, width: int) -> list[Text]:
        title = Text(escape_controls(self.titles[name]), "bold")
        title.truncate(width, overflow="crop")
        return [title, *(line for part in self.parts[name] for line in wrapped(part, self.console, width))]

    def _draw(self) -> None:
        if self._block is None or time.monotonic() - self._last_drawn < DRAW_AT_MOST:
            return
        self._last_drawn = time.monotonic()
        self._block.draw(self.lines()[-max(1, self.console.height - 2) :])


def as_text(message: Mapping[str, object]) -> Text:
    """A message of the environment with who says it."""
    role = str(message.get("role"))
    name = f"{role} {message['name']}" if message.get("name") else role
    return Text(escape_controls(f"{name}: {message.get('content')}"), "yellow")


def wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """The lines of a text in a column."""
    expanded = text.copy()
    expanded.expand_tabs(4)
    lines = list(expanded.wrap(console, width, overflow="fold"))
    for line in lines:
        line.rstrip()
    return lines


def joined(left: Text, right: Text, width: int, gap: Text) -> Text:
    """Two lines side by side."""
    return Text.assemble(left, " " * (width - left.cell_len), gap, right)
