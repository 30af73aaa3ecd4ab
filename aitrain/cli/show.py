"""`aitrain show`: a run and its rollouts in the terminal, or the runs of a folder, one line each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from aitrain.cli.flags import AsJson, print_json, run_names
from aitrain.errors import ConfigError
from aitrain.runs.run_folder import RUNS
from aitrain.ui.dashboard import duration, number

DAY = 86400
COLOURS = {
    "running": "green",
    "failed": "red",
    "stalled": "red",
    "dead": "red",
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
    from aitrain.ui.run_registry import RunRegistry, is_run, is_sweep, places

    folder = places([run])[0] if run is not None else Path(RUNS)
    has_filter = step is not None or case is not None or worst or failed
    if not is_run(folder) or is_sweep(folder):
        if has_filter:
            raise ConfigError(f"{folder} is not a run folder\nList the runs in it with: aitrain show {folder}")
        rows = [row for row in RunRegistry([folder]).rows() if bool(row["sweep"]) == is_sweep(folder)]
        rows.sort(key=lambda row: -row["heartbeat"])
        if as_json:
            print_json(rows)
        elif rows:
            Console(highlight=False, markup=False).print(_table(rows))
        else:
            typer.echo(f"There are no runs in {folder}.")
        return 0
    from aitrain.runs.rollout_index import RolloutIndex  # here, as the list needs none of these
    from aitrain.ui.episodes import Query, find
    from aitrain.ui.overview import Overview
    from aitrain.ui.terminal import run_texts
    from aitrain.ui.transcript import episodes
    from aitrain.ui.transcript import worst as by_score

    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    console = Console(highlight=False)
    if not has_filter:
        overview = Overview(folder, rollouts)
        if as_json:
            print_json(overview.to_json())
        else:
            page(console, run_texts(overview))
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


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each run; a name that is too long loses its end."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("run")  # the only one that may be narrower than its cells
    for name in ("status", "step", "", "scores", "age", "host"):
        table.add_column(name, justify="right" if name in ("step", "age") else "left", no_wrap=True)
    for row in rows:
        age, hosts = max(0.0, time.time() - row["heartbeat"]), row["hosts"]
        is_elsewhere = row["status"] in ("running", "stalled") and hosts != [socket.gethostname()]
        table.add_row(
            Text(_printable(row["name"]), no_wrap=True, overflow="ellipsis"),
            Text(row["status"], COLOURS.get(row["status"], "")),
            "/".join(str(number) for number in (row["step"], row["steps"]) if number is not None),
            *_scores(row),
            duration(age).split()[0] if age < DAY else f"{int(age // DAY)}d",
            _printable(f"{hosts[0]} +{len(hosts) - 1}" if len(hosts) > 1 else str(hosts[0])) if is_elsewhere else "",
        )
    return table


def _printable(text: str) -> str:
    """A name without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _scores(row: dict[str, Any]) -> tuple[str, str]:
    """What the scores are, and the held-out ones if there is one after training, else the reward of the first and of
    the last step. An eval has one score, a sweep those of its best trial."""
    kind = "held-out" if row["job"] == "grpo" else row["job"]
    scores = [interval and interval["mean"] for interval in (row["before"], row["after"])]
    if row["job"] == "grpo" and scores[1] is None and row["rewards"]:
        kind, scores = "reward", [row["rewards"][0], row["rewards"][-1]]
    if scores[1] is None:
        return "", ""
    first, last = map(number, scores)
    return kind, last if row["job"] == "eval" else f"{first} -> {last}"
