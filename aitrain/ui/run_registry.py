"""The runs that the page server shows, each known by an id that is not a path."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from aitrain.errors import ConfigError, did_you_mean
from aitrain.runs.run_folder import RUNS, SWEEP_LOG, RunFolder
from aitrain.ui.overview import Overview

SIGNS = ("metrics.jsonl", "status.json", "rollouts", SWEEP_LOG)
"""Files that identify the folder of a run or a sweep; one suffices. A config.yaml may be a file of options only."""


def runs_of(places: Iterable[Path]) -> dict[str, Path]:
    """The runs of some places, which are run folders, sweeps, and folders of both, by id: a sweep before its trials,
    those of a folder with the newest first. An id is a name; a second one of the name is `name (2)`."""
    found = dict[str, Path]()
    paths = ([place] if is_run(place) else _runs_inside(place) for place in map(Path.resolve, places))
    for path in dict.fromkeys(chain.from_iterable(paths)):
        id = path.name
        while id in found:
            id += " (2)"
        found[id] = path
        if is_sweep(path):
            found |= {f"{id}/{trial.name}": trial for trial in _runs_inside(path)}
    return found


def run_rows(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The table of runs; `is_given` is set for a run that was named itself, and not by its folder."""
    runs = runs_of(places)
    ids = {path: id for id, path in runs.items()}
    given = [place.resolve() for place in places]
    return [
        {
            **Overview(path).row(),
            "id": id,
            "sweep": ids.get(path.parent),
            "is_given": path in given,
        }
        for id, path in runs.items()
    ]


def _runs_inside(folder: Path) -> list[Path]:
    """The runs in a folder, the newest first; no links, and none that is closed to this user. None in a file."""
    runs = [path for path in folder.glob("*") if not path.is_symlink() and os.access(path, os.X_OK) and is_run(path)]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def is_sweep(path: Path) -> bool:
    """Whether a path is the folder of a sweep."""
    return (path / SWEEP_LOG).is_file()


def is_run(path: Path) -> bool:
    """Whether a path is a folder of a run or a sweep."""
    return path.is_dir() and any((path / sign).exists() for sign in SIGNS)


def run_named(name: str) -> RunFolder:
    """The run folder that an argument names, by its path or by its name in runs/.

    Raises:
        ConfigError: there is none.
    """
    (path,) = places([name])
    if not is_run(path):
        raise ConfigError(f"{path} is not a run folder\nList the runs in it with: aitrain show {path}")
    return RunFolder(path)


def places(names: Iterable[str]) -> list[Path]:
    """Paths of the arguments of a command: paths, or names of runs in runs/; without arguments, runs/ itself.

    Raises:
        ConfigError: an argument does not exist.
    """
    found, runs = list[Path](), Path(RUNS)
    for name in names:
        path = next((path for path in (Path(os.path.expanduser(name)), runs / name) if path.exists()), None)
        if path is None:
            near = did_you_mean(name, [path.name for path in runs.glob("*")])
            raise ConfigError(f"There is no run, folder or file {name}.{near}\nList the runs with: aitrain show")
        found.append(path)
    return found or [runs]
