"""A run in the terminal: one line while it runs, a small table and a curve at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aitrain.events import Ended, Evaluated, Event, Note, Phase, Step
from aitrain.run_folder import Result

LINE_EVERY = 10.0
"""Seconds between two progress lines where they cannot be rewritten: in a pipe, in CI."""

BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Screen:
    """Shows events: what changes on one line that is rewritten, what stays above it."""

    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    last_line: float = 0.0

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Phase):
            self._progress(event.text)
        elif isinstance(event, Note):
            self._keep(Text("! " + event.text, style="yellow"))
        elif isinstance(event, Evaluated) and event.sampled is not None:
            self._keep(Text(f"held-out score {event.when}: {event.sampled:.3f} sampled, {event.greedy:.3f} greedy"))
        elif isinstance(event, Step):
            self._progress(step_line(event), is_last=event.step == event.steps)
        elif isinstance(event, Ended):
            self._clear()

    def _progress(self, text: str, is_last: bool = False) -> None:
        if self.console.is_terminal:
            self._clear()
            self.console.print(Text(text), end="", overflow="ellipsis", no_wrap=True)
        elif is_last or time.monotonic() - self.last_line > LINE_EVERY:
            self.last_line = time.monotonic()
            self.console.print(Text(text))

    def _keep(self, text: Text) -> None:
        self._clear()
        self.console.print(text, soft_wrap=True)

    def _clear(self) -> None:
        if self.console.is_terminal:
            self.console.file.write("\r\x1b[2K")
            self.console.file.flush()


def step_line(event: Step) -> str:
    """`step 12/50   reward 0.531   1m 20s left`."""
    reward = "-" if event.reward is None else f"{event.reward:.3f}"
    return f"step {event.step}/{event.steps}   reward {reward}   {duration(event.seconds_left)} left"


def duration(seconds: float) -> str:
    """`8s`, `3m 05s`, `2h 10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def show_result(result: Result, console: Console) -> None:
    """The table, the curve and where everything lies."""
    rewards = [line["reward"] for line in result.history if line.get("reward") is not None]
    console.print(_table(result))
    if len(rewards) > 1:
        console.print(Text(f"\nreward over {result.steps} steps"))
        for line in curve(rewards, width=min(60, console.width - 8)):
            console.print(Text(line))
    console.print(Text(f"\nrun folder: {result.folder}"), soft_wrap=True)
    if (result.folder / "report.html").exists():
        console.print(Text(f"report: {result.folder / 'report.html'}"), soft_wrap=True)


def _table(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("held-out score", "before", "after"):
        table.add_column(name, justify="left" if name == "held-out score" else "right")
    table.add_row("sampled", _score(result.score_before), _score(result.score_after))
    table.add_row("greedy", _score(result.greedy_before), _score(result.greedy_after))
    table.caption = f"{result.steps} steps in {duration(result.seconds)}"
    table.caption_justify = "left"
    return table


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def curve(values: Sequence[float], width: int = 60, height: int = 5) -> list[str]:
    """Values from 0 to 1 as `height` lines of block characters, averaged into at most `width` columns."""
    columns = _averaged(values, width)
    lines = []
    for row in reversed(range(height)):
        filled = (min(max(value * height - row, 0.0), 1.0) for value in columns)
        label = {height - 1: "1.0", 0: "0.0"}.get(row, "")
        lines.append(f"{label:>3} │" + "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in filled))
    return lines


def _averaged(values: Sequence[float], width: int) -> list[float]:
    count = max(1, min(width, len(values)))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
