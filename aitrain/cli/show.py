"""`aitrain show`: a run and its rollouts in the terminal, or the runs of a folder, one line each."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from aitrain.cli.flags import AsJson, print_json, run_names
from aitrain.errors import ConfigError
from aitrain.runs.run_folder import RUNS
from aitrain.ui.duration import duration

if TYPE_CHECKING:
    from aitrain.runs.run_list import Run

DAY = 86400
COLOURS = {
    "running": "green",
    "failed": "red",
    "stalled": "red",
    "dead": "red",
    "damaged": "red",
    "stopped": "yellow",
}


def show(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=run_names,
            help="A run folder, or the name of a run in runs/; a folder with runs, or a sweep: these. [runs]",
        ),
    ] = None,
    *,
    step: Annotated[int | None, typer.Option(help="The rollouts of this step, group by group.")] = None,
    case: Annotated[
        str | None, typer.Option(help="All episodes of this case: the number of its row, or its case_idx.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Sort by score, lowest first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Episodes that the environment failed on.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of episodes.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show a run in the terminal: scores, curve, rollouts; or list the runs of a folder with status and scores."""
    from aitrain.runs.run_list import runs_in
    from aitrain.ui.run_registry import is_run, is_sweep, places

    folder = places([run])[0] if run is not None else Path(RUNS)
    has_filter = step is not None or case is not None or worst or failed
    if not is_run(folder) or is_sweep(folder):
        if has_filter:
            raise ConfigError(f"{folder} is not a run folder\nList the runs in it with: aitrain show {folder}")
        _list(runs_in(folder) if folder.exists() else [], folder, as_json)
        return 0
    from aitrain.runs.rollout_index import RolloutIndex  # here, as the list needs none of these
    from aitrain.ui.episodes import Query, find
    from aitrain.ui.overview import Overview
    from aitrain.ui.transcript import episodes, run_texts
    from aitrain.ui.transcript import worst as by_score

    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    console = Console(highlight=False)
    if not has_filter:
        if as_json:
            print_json(Overview(folder, rollouts).to_json())
        else:
            page(console, run_texts(Overview(folder, rollouts), rollouts))
        return 0
    query = Query(
        eval_phase="" if step is None else "training",
        step=step,
        case=case or "",
        failure="any" if failed else "",
    )
    numbers = (by_score(rollouts, query) if worst else find(rollouts, query))[:limit]
    if as_json:
        print_json([rollouts.record(rollouts.entries[number]).to_json() for number in numbers])
    elif numbers:
        page(console, episodes(rollouts, numbers))
    else:
        typer.echo("There are no such episodes.")
    return 0


def page(console: Console, parts: Iterable[RenderableType]) -> None:
    """Show a long text with the user's pager, or print it where output is no terminal."""
    os.environ.setdefault("LESS", "FRX")  # with colours, and exit if the text fits on one screen
    with console.pager(styles=True):
        for part in parts:
            console.print(part, soft_wrap=not console.is_terminal)


# -- the runs of a folder


def _list(runs: Sequence[Run], folder: Path, as_json: bool) -> None:
    """Print one line for each run; a name that is too long loses its end."""
    if as_json:
        print_json([asdict(run) for run in runs])
        return
    if not runs:
        typer.echo(f"There are no runs in {folder}.")
        return
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("run")  # the only one that may be narrower than its cells
    for name in ("status", "step", "", "scores", "age", "host"):
        table.add_column(name, justify="right" if name in ("step", "age") else "left", no_wrap=True)
    for run in runs:
        steps = "" if run.step is None else f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        is_elsewhere = run.status in ("running", "stalled") and (run.nodes or run.host != socket.gethostname())
        others = f" +{len(run.nodes) - 1}" if run.nodes else ""
        age = "" if run.age is None else duration(run.age).split()[0]
        if run.age is not None and run.age >= DAY:
            age = f"{int(run.age // DAY)}d"
        table.add_row(
            Text(_printable(run.name), no_wrap=True, overflow="ellipsis"),
            Text(run.status, COLOURS.get(run.status, "")),
            steps,
            *_scores(run),
            age,
            _printable(f"{run.host}{others}") if is_elsewhere else "",
        )
    Console(highlight=False, markup=False).print(table)


def _printable(text: str) -> str:
    """A name without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _scores(run: Run) -> tuple[str, str]:
    """What the scores are, and the held-out ones if there is one after training, else the reward of the first and of
    the last step. An eval has one score, a sweep those of its best trial."""
    before, after = run.score_before, run.score_after
    kind = "held-out" if run.job == "grpo" else run.job
    if run.job == "grpo" and after is None:
        kind, before, after = "reward", run.reward_first, run.reward_last
    if after is None:
        return "" if run.job == "grpo" else kind, ""
    first, last = ("-" if score is None else f"{score:.3f}" for score in (before, after))
    return kind, last if run.job == "eval" else f"{first} -> {last}"
