"""Shows a run in a notebook: one output of the cell that updates itself, as HTML and SVG without scripts.

It needs IPython's display handles only, so it works in Jupyter, VS Code and Colab. Its last state stays in the saved
notebook. All text is escaped.
"""

from __future__ import annotations

import contextvars
import threading
import time
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from aitrain.events import Ended, Evaluated, Event, Note, Step
from aitrain.redaction import redact
from aitrain.ui.dashboard import LABEL, Dashboard, number
from aitrain.ui.escape_controls import escape_controls

DRAW_AT_MOST = 0.3
"""Minimum seconds between two updates; each is a message to the browser."""
DRAW_EVERY = 2.0
"""Seconds between two updates without an event, for the clocks."""
WIDTH, HEIGHT, MARGIN = 640, 150, 34
POINTS = 400
"""Maximum points of the curve; neighbouring steps are averaged."""
STYLE = f"max-width:{WIDTH}px;font-family:ui-monospace,monospace;font-size:13px;line-height:1.5"
NOTE = "padding-left:8px;margin:4px 0;border-left:3px solid "
BLUE, ORANGE, GREY = "#3b82f6", "#f59e0b", "rgba(128,128,128,.25)"
"""Visible on light and on dark pages; all else has the page's own colour."""


@dataclass
class Curve:
    """The rewards by step, and the scores of the held-out cases."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Add the point of an event."""
        if isinstance(event, Step) and event.reward is not None:
            self.rewards.append((event.step, event.reward))
        elif isinstance(event, Evaluated) and event.sampled is not None:
            last = self.rewards[-1][0] if self.rewards else 0
            self.scores.append((last, event.sampled))

    def svg(self, steps: int) -> str:
        """The curve up to the last step of the run; empty before the first step."""
        if not self.rewards:
            return ""
        rewards = averaged_points(self.rewards)
        values = [value for _, value in rewards + self.scores]
        low, high = min(0.0, *values), max(1.0, *values)
        first, last = min(step for step, _ in rewards + self.scores), max(steps, self.rewards[-1][0])

        def place(point: tuple[int, float]) -> tuple[float, float]:
            x = MARGIN + (point[0] - first) / max(1, last - first) * (WIDTH - MARGIN - 8)
            return x, 8 + (high - point[1]) / (high - low) * (HEIGHT - 28)

        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, rewards))
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{ORANGE}"><title>held-out {score[1]:.3f}</title></circle>'
            for score, (x, y) in zip(self.scores, map(place, self.scores), strict=True)
        )
        grid = "".join(
            f'<line x1="{MARGIN}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.2"/>'
            f'<text x="{MARGIN - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
            for value, (_, y) in ((value, place((first, value))) for value in (low, high))
        )
        ends = f'<text x="{MARGIN}" y="{HEIGHT - 4}">step {first}</text>'
        ends += f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{last}</text>'
        style = f"width:100%;max-width:{WIDTH}px;display:block;font-size:11px"
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}" fill="currentColor" role="img"'
            f' aria-label="reward by step">{grid}{ends}'
            f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.8"/>{dots}</svg>'
        )


def averaged_points(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS points: the last step and the mean value of neighbouring ones."""
    size = -(-len(points) // POINTS)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(bucket[-1][0], sum(value for _, value in bucket) / len(bucket)) for bucket in buckets]


class NotebookDisplay:
    """Shows the events of a run below the cell that started it; takes the place of `Screen` in a notebook."""

    def __init__(self) -> None:
        self._dashboard, self._curve, self._notes = Dashboard(), Curve(), list[Note]()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._last_drawn = 0.0
        self._handle: Any = None
        # an update from another thread belongs to this cell, not to the one that runs by then
        self._context = contextvars.copy_context()
        self._ticker = threading.Thread(target=self._context.copy().run, args=[self._tick], daemon=True)

    def __enter__(self) -> NotebookDisplay:
        display = import_module("IPython.display").display
        self._handle = display(self._bundle(), raw=True, display_id=True)
        return self

    def start(self) -> NotebookDisplay:
        """Update every few seconds, for the clocks."""
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last state, which stays in the notebook."""
        self._closed.set()
        if self._ticker.is_alive():
            self._ticker.join()
        if error is not None:
            self._dashboard.phase = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._draw()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        with self._lock:
            self._dashboard.take(event)
            self._curve.take(event)
            if isinstance(event, Note):
                self._notes.append(replace(event, text=escape_controls(redact(event.text))))
            if isinstance(event, Ended):
                self._dashboard.phase = event.status if event.because is None else f"{event.status}: {event.because}"
            is_due = time.monotonic() - self._last_drawn > DRAW_AT_MOST
            if is_due or not isinstance(event, Step):
                self._draw()

    def _tick(self) -> None:
        while not self._closed.wait(DRAW_EVERY):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        self._last_drawn = time.monotonic()
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """The state as HTML, and as text where a notebook is shown without HTML."""
        lines = [line.plain.rstrip() for line in self._dashboard.lines(100)]
        return {
            "text/html": self.html(),
            "text/plain": "\n".join([*(note.mark + note.text for note in self._notes), *lines]),
        }

    def html(self) -> str:
        """The state of the run."""
        dashboard, step = self._dashboard, self._dashboard.step
        rows = {name: line.plain.rstrip() for name, line in dashboard.parts(100)}
        bar = svg = ""
        if step is not None:
            rows["step"] = f"{step.step}/{step.steps}  {dashboard.time_left}".rstrip()
            rows["reward"] = number(step.reward)
            bar = _bar(min(1.0, step.step / max(1, step.steps)))
            svg = self._curve.svg(step.steps)
        notes = "".join(_div(note.text, NOTE + (ORANGE if note.level == "warning" else GREY)) for note in self._notes)
        shown = "".join(_div(f"{name:<{LABEL}}{text}") for name, text in rows.items())
        return _div(f"{notes}{bar}{shown}{svg}", STYLE, is_html=True)


def _div(content: str, style: str = "", is_html: bool = False) -> str:
    inner = content if is_html else escape(content)
    return f'<div style="white-space:pre-wrap;{style}">{inner}</div>'


def _bar(share: float) -> str:
    filled = f'<div style="width:{share:.1%};height:6px;background:{BLUE};border-radius:3px"></div>'
    return _div(filled, f"background:{GREY};border-radius:3px;margin:4px 0", is_html=True)
