"""The runs that the page server shows, each known by an id that is not a path."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from aitrain.errors import ConfigError, did_you_mean
from aitrain.runs.environment_source import SourceFile, read_source
from aitrain.runs.json_values import JsonObject, as_float
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RUNS, RunFolder, read_object
from aitrain.ui.cases import case_rows, most_changed
from aitrain.ui.episodes import Found, Query, episode, find, page_of
from aitrain.ui.summary import RunSummary, summary

PATIENCE = 0.3
"""Seconds that a page waits for rollouts to be read before it is shown without them."""
SIGNS = ("config.yaml", "metrics.jsonl", "status.json", "rollouts")
"""What makes a folder a run's."""
MOST_RUNS = 500
MOST_CASES = 10_000


@dataclass(eq=False)
class OpenRun:
    """One run that is looked at. Its rollouts are read beside, and what is new whenever somebody asks again."""

    id: str
    path: Path
    rollouts: RolloutIndex = field(init=False)
    is_ready: bool = False
    _reader: threading.Thread | None = None
    _seen: tuple[object, ...] = ()
    _summary: RunSummary | None = None

    def __post_init__(self) -> None:
        self.rollouts = RolloutIndex(self.path if self.path.is_file() else self.path / "rollouts")

    def look(self) -> None:
        """Read what is new, for as long as somebody waits for it; the rest is read beside."""
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        if not self.is_ready:
            self._reader.join(PATIENCE)

    def _read(self) -> None:
        try:
            self.rollouts.refresh()
        except OSError:
            return  # the run is being removed, or written anew: the next look sees what is there then
        self.is_ready = True

    def summary(self) -> JsonObject:
        """The run at a glance; `version` changes whenever something of it does."""
        self.look()
        seen = self._stamp()
        if self._summary is None or seen != self._seen:
            self._summary = summary(self.path, self.rollouts if self.is_ready else None)
            self._seen = seen
        heartbeat = as_float(read_object(RunFolder(self.path).status).get("heartbeat"))
        ours = {"id": self.id, "is_ready": self.is_ready, "version": str(hash(seen)), "heartbeat": heartbeat}
        return {**self._summary, **ours}

    def _stamp(self) -> tuple[object, ...]:
        folder = RunFolder(self.path)
        stamps: list[tuple[int, int]] = []
        for path in (folder.metrics, folder.result, folder.config, folder.environment):
            with suppress(OSError):
                stat = path.stat()
                stamps.append((stat.st_size, stat.st_mtime_ns))
        status = read_object(folder.status)
        told = status.get("status"), status.get("step")
        return (self.is_ready, len(self.rollouts.entries), str(told), *stamps)

    def line(self) -> JsonObject:
        """The run in a list of runs."""
        folder = RunFolder(self.path)
        result, status = read_object(folder.result), read_object(folder.status)
        score = as_float(result.get("score_after"))
        return {"id": self.id, "name": self.path.name, "status": str(status.get("status", "")), "score_after": score}

    def source(self) -> list[SourceFile]:
        """The environment's source as the run has kept it."""
        return read_source(RunFolder(self.path).environment_source)

    def cases(self) -> JsonObject:
        """A row for each case; of very many, those that tell most."""
        rows = case_rows(self.rollouts)
        return {"rows": [asdict(row) for row in most_changed(rows, MOST_CASES)], "count": len(rows)}

    def episodes(self, query: Query, start: int) -> JsonObject:
        """One page of the episodes that a query asks for."""
        return page_of(self.rollouts, _found(self, len(self.rollouts.entries), query), start)

    def episode(self, number: int) -> JsonObject | None:
        """One episode, None when there is none of that number."""
        return episode(self.rollouts, number) if 0 <= number < len(self.rollouts.entries) else None


@lru_cache(maxsize=32)
def _found(run: OpenRun, count: int, query: Query) -> Found:
    """A search is done once for all the pages of its result, unless there are more episodes by then."""
    return find(run.rollouts, query)


class RunRegistry:
    """The runs of some places: run folders, folders of run folders, and single rollout files."""

    def __init__(self, places: Iterable[Path]) -> None:
        self.places = [place.resolve() for place in places]
        self.opened: dict[Path, OpenRun] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, OpenRun]:
        """All runs by id, the newest first where a folder of runs was given."""
        with self._lock:
            paths = list(dict.fromkeys(path for place in self.places for path in _runs_in(place)))[:MOST_RUNS]
            for path in paths:
                if path not in self.opened:
                    taken = {run.id for run in self.opened.values()}
                    names = [path.name, *(f"{path.name} ({number})" for number in range(2, len(taken) + 2))]
                    self.opened[path] = OpenRun(next(name for name in names if name not in taken), path)
            return {self.opened[path].id: self.opened[path] for path in paths}


def _runs_in(place: Path) -> Iterator[Path]:
    if place.is_file() or is_run(place):
        yield place
    elif place.is_dir():
        folders = [path for path in place.iterdir() if not path.is_symlink() and is_run(path)]
        yield from sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run."""
    return path.is_dir() and any((path / sign).exists() for sign in SIGNS)


def places(words: Iterable[str]) -> list[Path]:
    """What a user named: paths, or names of runs in runs/; without any, all of runs/.

    Raises:
        ConfigError: there is no such thing.
    """
    found, runs = list[Path](), Path(RUNS)
    for word in words:
        path = next((path for path in (Path(word).expanduser(), runs / word) if path.exists()), None)
        if path is None:
            near = did_you_mean(word, [path.name for path in runs.iterdir()] if runs.is_dir() else [])
            raise ConfigError(f"There is no run, folder or file {word}.{near}")
        found.append(path)
    if not found and not runs.exists():
        raise ConfigError(f"There is no folder {runs} here: no run to show yet\nSay where runs are: aitrain view PATH")
    return found or [runs]
