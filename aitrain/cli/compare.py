"""`aitrain compare`: models on the same cases, case by case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from aitrain.cli.completion import run_names
from aitrain.cli.pager import page, rendered
from aitrain.errors import ConfigError, WorseError

if TYPE_CHECKING:
    from typer._click import Context

    from aitrain.runs.comparison import Comparison

FAIL_IF_WORSE = "--fail-if-worse"


class CompareCommand(TyperCommand):
    """Takes --fail-if-worse without a margin as well."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Give the option a margin of 0 if no number follows."""
        given = list[str]()
        for argument, following in zip(args, (*args[1:], ""), strict=True):
            given += [argument, "0"] if argument == FAIL_IF_WORSE and not _is_number(following) else [argument]
        return super().parse_args(ctx, given)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


compare = typer.Typer(add_completion=False, rich_markup_mode=None)


@compare.command("compare", cls=CompareCommand)
def compare_models(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]...",
            autocompletion=run_names,
            help="Runs or evals, the first of which the others are compared with; of a single run, its model before"
            " training with the one after.",
        ),
    ],
    *,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            FAIL_IF_WORSE, metavar="[MARGIN]", min=0.0, help="Exit with code 4 if B is worse than A by more than this."
        ),
    ] = None,
    detect: Annotated[
        float | None, typer.Option(metavar="DIFFERENCE", help="Difference to plan for; unset: the measured one.")
    ] = None,
    cases: Annotated[
        int, typer.Option("--transcripts", min=0, help="How many lost and how many won cases are shown.")
    ] = 2,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the cases to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> int:
    """Compare models on the same cases: is B better than A, on which cases, and how sure is that?"""
    from aitrain.runs.comparison import compare_all  # here, because help needs none of it
    from aitrain.runs.recorded_scoring import read_scorings
    from aitrain.ui.run_registry import places

    comparisons = compare_all(read_scorings(places(models)))
    if html is not None:
        _write_page(html, comparisons)
    if as_json:
        typer.echo(json.dumps({"comparisons": [one.to_json() for one in comparisons]}, indent=2))
    else:
        _print(comparisons, cases, detect, html)
    worse = [one for one in comparisons if fail_if_worse is not None and one.is_worse_by(fail_if_worse)]
    if worse:
        raise WorseError("\n".join(_worse_sentence(one) for one in worse))
    return 0


def _worse_sentence(comparison: Comparison) -> str:
    from aitrain.runs.held_out import interval_text

    change = interval_text(comparison.main.change, True)
    return f"{comparison.b.label} is worse than {comparison.a.label}: {change}"


def _write_page(file: Path, comparisons: list[Comparison]) -> None:
    from aitrain.runs.run_folder import write_text
    from aitrain.ui.comparison_page import page_of_comparisons

    try:
        write_text(file, page_of_comparisons(comparisons))
    except OSError as error:
        raise ConfigError(f"--html: cannot write {file}: {error.strerror}") from None


def _print(comparisons: list[Comparison], cases: int, detect: float | None, html: Path | None) -> None:
    from rich.console import Console

    from aitrain.ui.comparison_text import ShownParts, comparison_texts

    console = Console(highlight=False)
    width = console.width if console.is_terminal else None
    page(rendered(console, comparison_texts(comparisons, ShownParts(cases, detect, width))))
    if html is not None:
        typer.echo(f"page: {html}")
