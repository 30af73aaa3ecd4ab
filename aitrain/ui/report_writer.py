"""Writes report.html at the end of a run and every few minutes before, and reward.png at its end."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from aitrain.events import Announce, Evaluating, Event, Note, Step
from aitrain.runs.environment_source import read_source
from aitrain.runs.json_values import JsonObject
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, write_bytes, write_text
from aitrain.ui.dashboard import averaged
from aitrain.ui.episodes import Limit, cases_json, choose, episode
from aitrain.ui.overview import Overview
from aitrain.ui.page import self_contained

EVERY = 180.0
"""Seconds between two reports during a run."""
MOST_CASES = 2_000
POINTS = 40
"""Points of the thick line, each the mean of neighbouring steps."""
IN_THE_PAGE = Limit(20_000, 120, 30)
"""Limits of an episode in the page; the rest is in the rollout files."""
SHARED = ("asked", "row", "tools", "rendered")


@dataclass
class ReportWriter:
    """Writes the report of one run, repeatedly; rollouts are read once."""

    folder: RunFolder
    last: float = field(default_factory=time.monotonic)
    """Time of the latest report that `during` began."""
    thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.rollouts = RolloutIndex(self.folder.rollouts)

    def write(self, announce: Announce) -> None:
        """Write report.html; an error is announced as a note, and does not end the run."""
        try:
            with self._lock:
                self.rollouts.refresh()
                page = self_contained(page_data(self.folder, self.rollouts))
                write_text(self.folder.report, page, durable=False)
        except Exception as error:
            announce(Note(f"report.html could not be written: {type(error).__name__}: {error}"))

    def finish(self, announce: Announce) -> None:
        """Write report.html and reward.png after the end of a run."""
        self.write(announce)
        try:
            draw_curve(Overview(self.folder.path, self.rollouts))
        except Exception as error:
            announce(Note(f"reward.png could not be drawn: {type(error).__name__}: {error}"))

    def during(self, announce: Announce) -> Announce:
        """An announce that forwards events, and writes the report every few minutes in a thread."""

        def forward(event: Event) -> None:
            announce(event)
            is_busy = self.thread is not None and self.thread.is_alive()
            if isinstance(event, (Step, Evaluating)) and time.monotonic() - self.last >= EVERY and not is_busy:
                self.last = time.monotonic()
                self.thread = threading.Thread(target=self.write, args=[announce], daemon=True)
                self.thread.start()

        return forward


def page_data(folder: RunFolder, rollouts: RolloutIndex) -> JsonObject:
    """The data of report.html. `shared` holds the values that all episodes of a group have in common."""
    shared: dict[str, int] = {}
    episodes = [episode(rollouts, number, IN_THE_PAGE) for number in choose(rollouts.entries)]
    for one in episodes:
        one |= {name: shared.setdefault(json.dumps(one[name]), len(shared)) for name in SHARED}
    return {
        "summary": Overview(folder.path, rollouts).to_json(),
        "cases": cases_json(rollouts, MOST_CASES),
        "source": read_source(folder.environment_source),
        "episodes": episodes,
        "shared": [json.loads(text) for text in shared],
        "written": time.time(),
    }


def draw_curve(overview: Overview) -> Path | None:
    """Draw reward and held-out score over the steps; returns None without matplotlib, or with fewer than two steps."""
    run, (steps, series) = overview.run, overview.curves
    rewards = series.get("reward", [])
    if find_spec("matplotlib") is None or len(overview.rewards) < 2:
        return None
    from matplotlib.figure import Figure  # here, because it is an extra; without pyplot, which keeps state and windows

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    known = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if reward is not None]
    smooth = zip(*(averaged(values, POINTS) for values in zip(*known, strict=True)), strict=True)
    axes.plot(*zip(*known, strict=True), color="#2f6fde", alpha=0.3, linewidth=1)
    axes.plot(*zip(*smooth, strict=True), color="#2f6fde", linewidth=2, label="reward")
    if held_out := [(point.step, point.sampled["mean"]) for point in overview.held_out if point.sampled]:
        axes.plot(*zip(*held_out, strict=True), "o--", color="#d1690e", markersize=5, label="held-out score")
    axes.set(xlabel="step", ylabel="score", title=run.path.name)
    if all(0.0 <= reward <= 1.0 for reward in overview.rewards):
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=160)
    picture = run.path / "reward.png"
    write_bytes(picture, image.getvalue(), durable=False)
    return picture
