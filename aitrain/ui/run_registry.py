"""The runs that the page server shows, each known by an id that is not a path."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, count
from pathlib import Path

from aitrain.errors import ConfigError, did_you_mean
from aitrain.runs.environment_source import SourceFile, read_source
from aitrain.runs.json_values import JsonObject, as_float
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RUNS, SWEEP_LOG, RunFolder, read_object
from aitrain.ui.cases import case_changes, case_rows, most_changed
from aitrain.ui.episodes import Found, Query, episode, find, page_of
from aitrain.ui.run_rows import RunRow, run_row, stamp
from aitrain.ui.summary import RunSummary, summary

PATIENCE = 0.3
"""Seconds that a page waits for rollouts to be read before it is shown without them."""
SIGNS = ("config.yaml", "metrics.jsonl", "status.json", "rollouts")
"""Files that identify a run folder; one suffices."""
MOST_RUNS = 2_000
MOST_CASES = 10_000


@dataclass(eq=False)
class OpenRun:
    """One run that a page shows. Its rollouts are read in a thread, new ones at each request."""

    id: str
    path: Path
    rollouts: RolloutIndex = field(init=False)
    is_ready: bool = False
    _reader: threading.Thread | None = None
    _seen: tuple[object, ...] = ()
    _summary: RunSummary | None = None
    _row: RunRow | None = None
    _row_seen: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.rollouts = RolloutIndex(self.path if self.path.is_file() else self.path / "rollouts")

    def look(self) -> None:
        """Read new rollouts in a thread; waits for the first ones, at most PATIENCE seconds."""
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        if not self.is_ready:
            self._reader.join(PATIENCE)

    def _read(self) -> None:
        try:
            self.rollouts.refresh()
        except OSError:
            return  # the run is being removed or replaced: the next request reads it again
        self.is_ready = True

    def summary(self) -> JsonObject:
        """The summary of the run; `version` changes with any of its values."""
        self.look()
        seen = (self.is_ready, len(self.rollouts.entries), *stamp(self.path))
        if self._summary is None or seen != self._seen:
            self._summary = summary(self.path, self.rollouts if self.is_ready else None)
            self._seen = seen
        heartbeat = as_float(read_object(RunFolder(self.path).status).get("heartbeat"))
        ours = {"id": self.id, "is_ready": self.is_ready, "version": str(hash(seen)), "heartbeat": heartbeat}
        return {**self._summary, **ours}

    def row(self) -> JsonObject:
        """The run in the table of runs."""
        seen = stamp(self.path)
        if self._row is None or seen != self._row_seen:
            self._row, self._row_seen = run_row(self.path), seen
        heartbeat = as_float(read_object(RunFolder(self.path).status).get("heartbeat")) or self._row["heartbeat"]
        return {**self._row, "id": self.id, "heartbeat": heartbeat}

    def source(self) -> list[SourceFile]:
        """The environment's source that the run has kept."""
        return read_source(RunFolder(self.path).environment_source)

    def cases(self) -> JsonObject:
        """A row for each case; at most MOST_CASES, those whose score changed most."""
        rows = case_rows(self.rollouts)
        shown = [asdict(row) for row in most_changed(rows, MOST_CASES)]
        return {"rows": shown, "count": len(rows), "changes": case_changes(rows)}

    def episodes(self, query: Query, start: int) -> JsonObject:
        """One page of the episodes that match a query."""
        return page_of(self.rollouts, _found(self, len(self.rollouts.entries), query), start)

    def episode(self, number: int) -> JsonObject | None:
        """One episode; None if the number is out of range."""
        return episode(self.rollouts, number) if 0 <= number < len(self.rollouts.entries) else None


@lru_cache(maxsize=32)
def _found(run: OpenRun, count: int, query: Query) -> Found:
    """Episodes that match a query, cached for all pages of the result until there are more episodes."""
    return find(run.rollouts, query)


class RunRegistry:
    """The runs of some places: run folders, sweeps, folders of both, and single rollout files."""

    def __init__(self, places: Iterable[Path]) -> None:
        self.places = [place.resolve() for place in places]
        self.opened: dict[Path, OpenRun] = {}
        self._sweeps: dict[str, Path] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, OpenRun]:
        """All runs by id, with the trials of sweeps; those of a folder with the newest first."""
        with self._lock:
            found = list(dict.fromkeys(path for place in self.places for path in _found_in(place)))
            self._sweeps = _with_ids({path: path.name for path in found if is_sweep(path)})
            trials = {path: f"{id}/{path.name}" for id, sweep in self._sweeps.items() for path in _runs_in(sweep)}
            runs = {path: path.name for path in found if not is_sweep(path)}
            paths = list({**runs, **trials})[:MOST_RUNS]
            new = {path: {**runs, **trials}[path] for path in paths if path not in self.opened}
            taken = [run.id for run in self.opened.values()]
            for id, path in _with_ids(new, taken).items():
                self.opened[path] = OpenRun(id, path)
            return {self.opened[path].id: self.opened[path] for path in paths}

    def sweeps(self) -> dict[str, Path]:
        """The folders of all sweeps by id."""
        self.runs()
        return self._sweeps

    def rows(self) -> list[JsonObject]:
        """The table of runs, sweeps first; `is_given` is set for a run that was named itself, and not by its folder."""
        runs, sweeps = self.runs(), self._sweeps
        ids = {folder: id for id, folder in sweeps.items()}
        return [
            *({**run_row(folder), "id": id, "is_given": False, "sweep": None} for id, folder in sweeps.items()),
            *(
                {**run.row(), "is_given": run.path in self.places, "sweep": ids.get(run.path.parent)}
                for run in runs.values()
            ),
        ]


def _with_ids(names: Mapping[Path, str], taken: Iterable[str] = ()) -> dict[str, Path]:
    """Each path by an id made of its name; a second one of a name is `name (2)`."""
    found: dict[str, Path] = {}
    used = set(taken)
    for path, name in names.items():
        numbered = (f"{name} ({number})" for number in count(2))
        id = next(one for one in chain([name], numbered) if one not in used)
        used.add(id)
        found[id] = path
    return found


def _found_in(place: Path) -> Iterator[Path]:
    """The runs and sweeps of a place."""
    if place.is_file() or is_run(place) or is_sweep(place):
        yield place
    elif place.is_dir():
        folders = [path for path in place.iterdir() if _may_enter(path) and (is_run(path) or is_sweep(path))]
        yield from sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _runs_in(sweep: Path) -> list[Path]:
    return sorted(path for path in sweep.iterdir() if _may_enter(path) and is_run(path))


def _may_enter(path: Path) -> bool:
    """Whether a folder inside another is one of its runs, and not closed to this user."""
    return not path.is_symlink() and os.access(path, os.X_OK)


def is_sweep(path: Path) -> bool:
    """Whether a path is the folder of a sweep."""
    return (path / SWEEP_LOG).is_file()


def is_run(path: Path) -> bool:
    """Whether a path is a run folder."""
    return path.is_dir() and any((path / sign).exists() for sign in SIGNS)


def places(names: Iterable[str]) -> list[Path]:
    """Paths of the arguments of a command: paths, or names of runs in runs/; without arguments, runs/ itself.

    Raises:
        ConfigError: an argument does not exist.
    """
    found, runs = list[Path](), Path(RUNS)
    for name in names:
        path = next((path for path in (Path(name).expanduser(), runs / name) if path.exists()), None)
        if path is None:
            near = did_you_mean(name, [path.name for path in runs.iterdir()] if runs.is_dir() else [])
            raise ConfigError(f"There is no run, folder or file {name}.{near}\nList the runs with: aitrain show")
        found.append(path)
    if not found and not runs.exists():
        raise ConfigError(f"There is no folder {runs} here: no run to show yet\nGive a path: aitrain view PATH")
    return found or [runs]
