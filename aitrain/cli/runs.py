"""`aitrain runs`: the runs of a folder, one line each."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.runs.run_folder import RUNS
from aitrain.ui.duration import duration

if TYPE_CHECKING:
    from aitrain.runs.run_list import Run

COLOURS = {
    "running": typer.colors.GREEN,
    "failed": typer.colors.RED,
    "stalled": typer.colors.RED,
    "dead": typer.colors.RED,
    "damaged": typer.colors.RED,
    "stopped": typer.colors.YELLOW,
}
AFTER_NAME, HOST = 50, 16
"""Columns of a line that are not the run's name, and of its host, which are there if one runs on several machines or on
another one."""


def runs(
    folder: Annotated[Path | None, typer.Argument(help="Folder with runs, or a run or its name. [runs]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of lines.")] = False,
) -> int:
    """List the runs of a folder with status and scores."""
    from aitrain.runs.run_list import runs_in  # here, because help needs none of it

    where = folder or Path(RUNS)
    if folder is not None and not folder.exists():
        from aitrain.ui.run_registry import places

        (where,) = places([str(folder)])
    found = [] if folder is None and not where.exists() else runs_in(where)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in found], indent=2))
        return 0
    if not found:
        typer.echo(f"There are no runs in {where}.")
        return 0
    for line in _lines(found, shutil.get_terminal_size().columns):
        typer.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    return 0


def _lines(found: Iterable[Run], width: int) -> Iterator[str]:
    """Lines of at most `width` columns; a name that is too long loses its middle."""
    # a folder's name may contain control characters
    names = {run: "".join(letter if letter.isprintable() else "?" for letter in run.name) for run in found}
    hosts = {run: _host(run) for run in names}
    wide = HOST + 2 if any(hosts.values()) else 0
    room = min(max(4, *map(len, names.values())), max(12, width - AFTER_NAME - wide))
    yield f"{'run':{room}} {'status':8} {'step':>10} {'':8} {'scores':14}  age{'  host' if wide else ''}"
    for run, name in names.items():
        status = typer.style(f"{run.status:8}", COLOURS.get(run.status))
        kind, scores = _scores(run)
        age = ""  # `8s`, `3m`, `2h`, `12d`
        if run.age is not None:
            age = f"{int(run.age // 86400)}d" if run.age >= 86400 else duration(run.age).split()[0]
        step = "" if run.step is None else f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        line = f"{_shortened(name, room):{room}} {status} {step:>10} {kind:8} {scores:14} {age:>4}"
        yield f"{line}  {hosts[run]}".rstrip()


def _host(run: Run) -> str:
    """Where a run is running: `gpu1 +3` on four machines; empty if it has ended, or is on this machine alone."""
    if run.status not in ("running", "stalled") or not run.host or (not run.nodes and run.host == socket.gethostname()):
        return ""
    others = f" +{len(run.nodes) - 1}" if run.nodes else ""
    host = "".join(letter if letter.isprintable() else "?" for letter in run.host)
    return _shortened(host, HOST - len(others)) + others


def _scores(run: Run) -> tuple[str, str]:
    """The held-out scores if there is one after training, else the reward of the first and of the last step. An eval
    has one score, a sweep those of its best trial."""
    if run.job == "eval":
        return "eval", _score(run.score_after)
    if run.score_after is not None:
        return "sweep" if run.job == "sweep" else "held-out", f"{_score(run.score_before)} -> {_score(run.score_after)}"
    if run.reward_last is not None:
        return "reward", f"{_score(run.reward_first)} -> {_score(run.reward_last)}"
    return "sweep" if run.job == "sweep" else "", ""


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    head = (room - 1) // 2
    return name[:head] + "…" + name[len(name) - (room - 1 - head) :]
