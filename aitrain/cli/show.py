"""`aitrain show`: a run and its rollouts in the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.completion import run_names
from aitrain.cli.pager import page, rendered
from aitrain.errors import ConfigError

if TYPE_CHECKING:
    from aitrain.runs.rollout_index import RolloutIndex


@dataclass(frozen=True)
class Asked:
    """The options of the command: a filter of episodes; without options, the run itself is shown."""

    step: int | None
    case: str | None
    worst: bool
    failed: bool
    limit: int | None

    @property
    def is_overview(self) -> bool:
        """Whether the run itself is shown, and no episodes."""
        return self.step is None and self.case is None and not (self.worst or self.failed)


def show(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", autocompletion=run_names, help="A run folder, or the name of a run in runs/."),
    ],
    *,
    step: Annotated[int | None, typer.Option(help="The rollouts of this step, group by group.")] = None,
    case: Annotated[
        str | None, typer.Option(help="All episodes of this case: the number of its row, or its case_idx.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Sort by score, lowest first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Episodes that the environment failed on.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of episodes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the run, or the records of episodes.")] = False,
) -> int:
    """Show a run in the terminal: scores, curve, rollouts."""
    from aitrain.runs.rollout_index import RolloutIndex  # here, because help needs none of it
    from aitrain.ui.run_registry import is_run, places

    (folder,) = places([run])
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run folder\nList the runs in it with: aitrain runs {folder}")
    asked, rollouts = Asked(step, case, worst, failed, limit), RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    numbers = None if asked.is_overview else _numbers(rollouts, asked)
    (_print_json if as_json else _print)(folder, rollouts, numbers)
    return 0


def _numbers(rollouts: RolloutIndex, asked: Asked) -> list[int]:
    from aitrain.ui.episodes import Query, find
    from aitrain.ui.transcript import worst

    steps = sorted({entry.step for entry in rollouts.entries if not entry.eval_phase})
    if asked.step is not None and asked.step not in steps:
        known = f"it has rollouts of steps {steps[0]} to {steps[-1]}" if steps else "it has no rollouts of training"
        raise ConfigError(f"step: there are no rollouts of step {asked.step}: {known}")
    query = Query(
        eval_phase="training" if asked.step is not None else "",
        step=asked.step,
        case=asked.case or "",
        failure="any" if asked.failed else "",
    )
    found = worst(rollouts, query) if asked.worst else find(rollouts, query)
    if asked.case is not None and not find(rollouts, Query(case=asked.case)):
        raise ConfigError(f"case: there is no episode of case {asked.case}")
    return found[: asked.limit]


def _print_json(folder: Path, rollouts: RolloutIndex, numbers: list[int] | None) -> None:
    """Print JSON in ASCII, so that it contains no control characters."""
    from aitrain.ui.overview import Overview

    if numbers is None:
        typer.echo(json.dumps(Overview(folder, rollouts).to_json(), indent=2))
        return
    separator = "[\n"
    for number in numbers:
        typer.echo(separator + json.dumps(rollouts.record(rollouts.entries[number]).to_json()), nl=False)
        separator = ",\n"
    typer.echo("\n]" if numbers else "[]")


def _print(folder: Path, rollouts: RolloutIndex, numbers: list[int] | None) -> None:
    from rich.console import Console

    from aitrain.ui.overview import Overview
    from aitrain.ui.transcript import episodes, run_texts

    console = Console(highlight=False)
    if numbers is None:
        shown = run_texts(Overview(folder, rollouts), rollouts)
    elif numbers:
        shown = episodes(rollouts, numbers)
    else:
        typer.echo("There are no such episodes.")
        return
    page(rendered(console, shown))
