"""Commands that show runs: `aitrain show`, `aitrain view` and `aitrain compare`."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from aitrain.cli.flags import AsJson, print_json, run_argument
from aitrain.errors import ConfigError, WorseError
from aitrain.ui.dashboard import duration, number
from aitrain.ui.output import escape_controls

LONGEST_NAME = 24
"""Columns of a name in the table of runs; the end of a longer one is left out."""
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
        run_argument(
            "RUN", "A run folder, or the name of a run in runs/; a folder with runs, or a sweep: these. [runs]"
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
    from aitrain.ui.run_registry import is_run, is_sweep, places, run_rows

    (folder,) = places([] if run is None else [run])
    has_filter = step is not None or case is not None or worst or failed
    if not is_run(folder) or is_sweep(folder):
        if has_filter:
            raise ConfigError(f"{folder} is not a run folder\nList the runs in it with: aitrain show {folder}")
        rows = [row for row in run_rows([folder]) if bool(row["sweep"]) == is_sweep(folder)]
        if as_json:
            print_json(rows)
        elif rows:
            Console(highlight=False).print(_table(rows), soft_wrap=True)
        else:
            typer.echo(f"There are no runs in {folder}.")
        return 0
    from aitrain.runs.rollout_index import RolloutIndex  # here, as the list needs none of these
    from aitrain.ui import transcript
    from aitrain.ui.episodes import Query, find
    from aitrain.ui.overview import Overview
    from aitrain.ui.terminal import run_texts, text_table

    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    console = Console(highlight=False)
    if not has_filter:
        overview = Overview(folder, rollouts)
        if as_json:
            print_json(overview.to_json())
        else:
            state = overview.state
            end = [Text(escape_controls(f"\n{state['status']}: {state['reason']}"))] if state["reason"] else []
            if state["next"]:
                end += [Text("\ncontinue with:"), text_table([("  " + escape_controls(str(state["next"])),)])]
            page(console, (*run_texts(overview), *end))
        return 0
    query = Query(
        eval_phase="" if step is None else "training",
        step=step,
        case=case or "",
        failure="any" if failed else "",
    )
    entries = (transcript.worst(rollouts, query) if worst else find(rollouts, query))[:limit]
    if as_json:
        print_json([rollouts.record(entry).to_json() for entry in entries])
    elif entries:
        page(console, transcript.episodes(rollouts, entries))
    else:
        typer.echo("There are no such episodes.")
    return 0


def page(console: Console, parts: Iterable[RenderableType]) -> None:
    """Show a long text with the user's pager, or print it where output is no terminal."""
    os.environ.setdefault("LESS", "FRX")  # with colours, and exit if the text fits on one screen
    with console.pager(styles=True):
        for part in parts:
            is_table = isinstance(part, Text) and bool(part.no_wrap)
            console.print(part, soft_wrap=is_table or not console.is_terminal)


# -- the runs of a folder


def _table(rows: Sequence[dict[str, Any]]) -> Text:
    """One line for each run, with the held-out scores if there is one after training, else the reward of the first and
    of the last step. An eval has one score, a sweep those of its best trial."""
    from aitrain.ui.terminal import text_table

    lines: list[list[str | Text]] = [["run", "status", "step", "", "scores", "age"]]
    for row in rows:
        steps = "/".join(str(number) for number in (row["step"], row["steps"]) if number is not None)
        status = Text(row["status"], COLOURS.get(row["status"], ""))
        age = duration(max(0.0, time.time() - row["heartbeat"])).split()[0] if row["heartbeat"] else ""
        name = Text(" ".join(escape_controls(row["name"]).split()))
        name.truncate(LONGEST_NAME, overflow="ellipsis")
        kind = row["job"].replace("grpo", "held-out")
        scores = [one["mean"] for one in (row["before"], row["after"]) if one]
        if row["after"] is None:
            kind, scores = ("reward", [row["rewards"][0], row["rewards"][-1]]) if row["rewards"] else ("", [])
        lines.append([name, status, steps, kind, " -> ".join(map(number, scores)), age])
    return text_table(lines)


def view(
    runs: Annotated[
        list[str] | None,
        run_argument("RUN", "Run folders, or folders of them."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8765,
) -> int:
    """Show runs as a page in the browser, on 127.0.0.1 only: prints its address.

    The address holds a key, without which other users of the machine get nothing.
    """
    from aitrain.ui.run_registry import places
    from aitrain.ui.server import PageServer

    server = PageServer(places(runs or []), port)
    typer.echo(f"{server.address}  (stop with Ctrl-C)")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it by default
    with suppress(KeyboardInterrupt):
        server.run()
    return 0


def compare(
    models: Annotated[
        list[str],
        run_argument("RUN", "Trainings and evals: run folders, or names in runs/."),
    ],
    *,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1e9,
            metavar="MARGIN",
            help="Exit with code 4 if B is worse than A, by more than MARGIN at the interval's upper limit; 0: at all.",
        ),
    ] = None,
    transcripts: Annotated[
        int, typer.Option(min=0, help="Lost cases and won cases that are shown with transcripts, of each kind.")
    ] = 2,
    html: Annotated[Path | None, typer.Option(help="Write a page with the cases into this file.")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare models on the same cases: is B better than A, on which cases, and how sure is that?

    With one run: its model before training and the one after. With several, the first one with each of the others, by
    the scores of evals, and of runs after their training. A model without scores gets them by aitrain eval.
    """
    from aitrain.runs.comparison import compare_all
    from aitrain.runs.held_out import interval_text
    from aitrain.runs.recorded_scoring import read_scorings
    from aitrain.ui.comparison_view import comparison_texts, page_of_comparisons
    from aitrain.ui.run_registry import run_named

    comparisons = compare_all(read_scorings([run_named(model).path for model in models]))
    if html is not None:
        html.write_text(page_of_comparisons(comparisons), encoding="utf-8")
    if as_json:
        print_json({"comparisons": [one.to_json() for one in comparisons]})
    else:
        page(Console(highlight=False), comparison_texts(comparisons, transcripts))
    worse = [
        f"{one.b.label} is worse than {one.a.label}: {interval_text(one.change, True)}"
        for one in comparisons
        if fail_if_worse is not None and one.is_worse_by(fail_if_worse)
    ]
    if worse:
        raise WorseError("\n".join(worse))
    return 0
