"""Writes report.html at the end of a run and every few minutes before."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

from aitrain.events import Announce, Evaluating, Event, Note, Step
from aitrain.runs.environment_source import read_source
from aitrain.runs.json_values import JsonObject
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, write_text
from aitrain.ui.episodes import Limit, cases_json, choose, episode
from aitrain.ui.overview import Overview
from aitrain.ui.page import self_contained

EVERY = 180.0
"""Seconds between two reports during a run."""
MOST_CASES = 2_000
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
