"""Shows a run in a notebook: one output of the cell that updates itself, as HTML and SVG without scripts.

It needs IPython's display handles only, so it works in Jupyter, VS Code and Colab. Its last state stays in the saved
notebook. All text is escaped.
"""

from __future__ import annotations

import contextvars
import threading
import time
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from aitrain.events import Ended, Evaluated, Event, Note, Step
from aitrain.redaction import redact
from aitrain.ui.dashboard import LABEL, Dashboard, averaged, number
from aitrain.ui.escape_controls import escape_controls

DRAW_AT_MOST = 0.3
"""Minimum seconds between two updates; each is a message to the browser."""
DRAW_EVERY = 2.0
"""Seconds between two updates without an event, for the clocks."""
WIDTH, HEIGHT, MARGIN = 640, 150, 34
POINTS = 400
"""Maximum points of the curve; neighbouring steps are averaged."""
STYLE = f"max-width:{WIDTH}px;font-family:ui-monospace,monospace;font-size:13px;line-height:1.5;white-space:pre-wrap"
BLUE, ORANGE, GREY = "#3b82f6", "#f59e0b", "rgba(128,128,128,.25)"
"""Visible on light and on dark pages; all else has the page's own colour."""


class NotebookDisplay:
    """Shows the events of a run below the cell that started it; takes the place of `Screen` in a notebook."""

    def __init__(self) -> None:
        self._dashboard, self._notes = Dashboard(), list[Note]()
        self._scores: list[tuple[int, float]] = []
        """The scores of the held-out cases, each with the number of rewards before it."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._last_drawn = 0.0
        self._handle: Any = None
        # an update from another thread belongs to this cell, not to the one that runs by then
        self._ticker = threading.Thread(target=contextvars.copy_context().run, args=[self._tick], daemon=True)

    def __enter__(self) -> NotebookDisplay:
        self._handle = import_module("IPython.display").display(self._bundle(), raw=True, display_id=True)
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
            if isinstance(event, Evaluated) and event.sampled is not None:
                self._scores.append((len(self._dashboard.rewards), event.sampled))
            elif isinstance(event, Note):
                self._notes.append(Note(escape_controls(redact(event.text)), event.level))
            elif isinstance(event, Ended):
                self._dashboard.phase = event.status if event.because is None else f"{event.status}: {event.because}"
            if time.monotonic() - self._last_drawn > DRAW_AT_MOST or not isinstance(event, Step):
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
        step = self._dashboard.step
        rows = {name: line.plain.rstrip() for name, line in self._dashboard.parts(100).items()}
        text = [
            *(note.mark + note.text for note in self._notes),
            *(f"{name:<{LABEL}}{row}" for name, row in rows.items()),
        ]
        html = ""
        for note in self._notes:
            edge = ORANGE if note.level == "warning" else GREY
            html += f'<div style="padding-left:8px;margin:4px 0;border-left:3px solid {edge}">{escape(note.text)}</div>'
        if step is not None:
            filled = f"width:{min(1.0, step.step / max(1, step.steps)):.1%};height:6px;background:{BLUE}"
            html += f'<div style="background:{GREY};margin:4px 0"><div style="{filled}"></div></div>'
            rows |= {"step": rows["step"].replace("━", "").replace("─", ""), "reward": number(step.reward)}
        html += "".join(f"<div>{escape(f'{name:<{LABEL}}{row}')}</div>" for name, row in rows.items())
        html += "" if step is None else self._curve(step)
        return {"text/html": f'<div style="{STYLE}">{html}</div>', "text/plain": "\n".join(text)}

    def _curve(self, step: Step) -> str:
        """The rewards as a line up to the last step of the run, and the held-out scores as points."""
        rewards = self._dashboard.rewards
        if not rewards:
            return ""
        points = averaged(rewards, POINTS)
        values = [*points, *(score for _, score in self._scores)]
        low, high = min(0.0, *values), max(1.0, *values)
        last = max(step.steps, step.step)
        steps_of_a_reward = step.step / len(rewards)

        def place(reward: float, value: float) -> tuple[float, float]:
            x = MARGIN + reward * steps_of_a_reward / last * (WIDTH - MARGIN - 8)
            return x, 8 + (high - value) / (high - low) * (HEIGHT - 28)

        each = len(rewards) / len(points)
        line = " ".join("{:.1f},{:.1f}".format(*place((n + 1) * each, value)) for n, value in enumerate(points))
        drawn = f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.8"/>'
        for count, score in self._scores:
            x, y = place(count, score)
            title = f"<title>held-out {score:.3f}</title>"
            drawn += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{ORANGE}">{title}</circle>'
        for value in (low, high):
            _, y = place(0, value)
            drawn += f'<path d="M{MARGIN} {y:.1f}H{WIDTH - 8}" stroke="currentColor" opacity="0.2"/>'
            drawn += f'<text x="{MARGIN - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        drawn += f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">step {last}</text>'
        style = f"width:100%;max-width:{WIDTH}px;display:block;font-size:11px"
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}" fill="currentColor">{drawn}</svg>'
