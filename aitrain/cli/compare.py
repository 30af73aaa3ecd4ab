"""`aitrain compare`: models on the same cases, case by case, by the scores that runs and evals have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, print_json, run_names
from aitrain.errors import ConfigError, WorseError
from aitrain.runs.run_folder import RUNS, write_text


def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B...",
            autocompletion=run_names,
            help="Trainings and evals: run folders, or names in runs/.",
        ),
    ] = None,
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
    detect: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e9, help="Difference to compute the number of cases for; unset: the measured one."),
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
    from rich.console import Console

    from aitrain.cli.show import page
    from aitrain.runs.comparison import compare_all
    from aitrain.runs.held_out import interval_text
    from aitrain.runs.recorded_scoring import read_scorings
    from aitrain.ui.comparison_view import comparison_texts, page_of_comparisons

    if not models:
        raise ConfigError("Name what is compared: aitrain compare RUN, or aitrain compare A B")
    comparisons = compare_all(read_scorings([_folder(model) for model in models]))
    if html is not None:
        try:
            write_text(html, page_of_comparisons(comparisons))
        except OSError as error:
            raise ConfigError(f"--html: cannot write {html}: {error.strerror}") from None
    if as_json:
        print_json({"comparisons": [one.to_json() for one in comparisons]})
    else:
        console = Console(highlight=False)
        page(console, comparison_texts(comparisons, transcripts, detect))
        if html is not None:
            typer.echo(f"page: {html}")
    worse = [
        f"{one.b.label} is worse than {one.a.label}: {interval_text(one.main.change, True)}"
        for one in comparisons
        if fail_if_worse is not None and one.is_worse_by(fail_if_worse)
    ]
    if worse:
        raise WorseError("\n".join(worse))
    return 0


def _folder(model: str) -> Path:
    """The run folder that an argument names.

    Raises:
        ConfigError: it is none.
    """
    from aitrain.ui.run_registry import is_run

    for path in (Path(model).expanduser(), Path(RUNS) / model):
        if is_run(path):
            return path
    raise ConfigError(f"{model} is no run and no eval\nScore it first with: aitrain eval {model}")
