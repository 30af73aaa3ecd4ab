"""`aitrain compare`: models on the same cases, case by case. Models without recorded scores are evaluated first."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from aitrain.cli.completion import run_names
from aitrain.cli.eval import SHOWN, AskedEvals, run_evals
from aitrain.cli.flags import Flag, given_flags, with_options
from aitrain.cli.pager import page, rendered
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import ConfigError, WorseError
from aitrain.options.documentation import help_text
from aitrain.options.evaluate import EvalConfig

if TYPE_CHECKING:
    from typer._click import Context

    from aitrain.runs.comparison import Comparison

FAIL_IF_WORSE = "--fail-if-worse"


class CompareCommand(TyperCommand):
    """Takes --fail-if-worse without a margin as well."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Give the option a margin of 0 if no number follows."""
        given = list[str]()
        for argument, following in pairwise((*args, "")):
            given += [argument, "0"] if argument == FAIL_IF_WORSE and not _is_number(following) else [argument]
        return super().parse_args(ctx, given)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    """Print the help; Typer's has no sections, and cuts long flags."""
    if wanted and not ctx.resilient_parsing:
        typer.echo(HELP + help_text(EvalConfig, min(100, shutil.get_terminal_size().columns), SHOWN))
        raise typer.Exit()


HELP = """\
Usage: aitrain compare A B... [OPTIONS]
       aitrain compare RUN [OPTIONS]

  Compare models on the same cases: is B better than A, on which cases, and how sure is that?

    aitrain compare runs/sums                     its model before training with the one after
    aitrain compare runs/sums runs/sums-2         the models of two runs
    aitrain compare tiny runs/sums --samples 8    evaluate both first

  A and B are run folders, evals, or models as for aitrain eval. A run is compared by the scores
  after its training. A model without scores is evaluated first, with the options of the first run
  or eval among them. With an option of aitrain eval, the models of runs are evaluated as well.

Command:
  --fail-if-worse [MARGIN]
        Exit with code 4 if B is worse than A, by more than MARGIN at the interval's upper limit.
  --detect DIFFERENCE
        Difference to compute the number of cases for; unset: the measured one.
  --transcripts INTEGER
        Lost cases and won cases that are shown with transcripts, of each kind. [2]
  --html FILE
        Write a page with the cases into this file.
  --json
        Print a JSON object.
  --cases INTEGER
        Held-out cases; unset: those of a training with these options.
  --samples INTEGER
        Sampled completions of each case.
  --config FILE
        YAML file with options of the evals; flags override it.
  -q, --quiet
        Show errors and the comparison only.
  -v, --verbose
        Also show the output of the libraries and the environment.
  --debug
        Show tracebacks, and all output at the end.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""

compare = typer.Typer(add_completion=False, rich_markup_mode=None)


@compare.command("compare", cls=CompareCommand)
@with_options(EvalConfig, SHOWN)
def compare_models(
    models: Annotated[list[str] | None, typer.Argument(metavar="A B...", autocompletion=run_names)] = None,
    config: Annotated[Path | None, typer.Option("--config")] = None,
    *,
    fail_if_worse: Annotated[float | None, typer.Option(FAIL_IF_WORSE, min=0.0)] = None,
    detect: Annotated[float | None, typer.Option("--detect")] = None,
    transcripts: Annotated[int, typer.Option("--transcripts", min=0)] = 2,
    html: Annotated[Path | None, typer.Option("--html")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    cases: Annotated[str | None, typer.Option("--cases")] = None,
    samples: Annotated[str | None, typer.Option("--samples")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Flag,
) -> int:
    """Compare models on the same cases: is B better than A, on which cases, and how sure is that?"""
    from aitrain.runs.comparison import compare_all  # here, because help needs none of it
    from aitrain.runs.recorded_scoring import read_scorings

    if not models:
        raise ConfigError("Name what is compared: aitrain compare RUN, or aitrain compare A B")
    for flag, number in ((FAIL_IF_WORSE, fail_if_worse), ("--detect", detect)):
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"{flag} {number}: give a difference of two scores, such as 0.05")
    given = given_flags(flags, eval_cases=cases, eval_samples=samples)
    asked = AskedEvals(models, given, config, "reuse", Verbosity(quiet, verbose, debug))
    comparisons = compare_all(read_scorings(scored_folders(asked)))
    if html is not None:
        _write_page(html, comparisons)
    if as_json:
        typer.echo(json.dumps({"comparisons": [one.to_json() for one in comparisons]}, indent=2))
    else:
        _print(comparisons, transcripts, detect)
    if html is not None and not as_json:
        typer.echo(f"page: {html}")
    worse = [one for one in comparisons if fail_if_worse is not None and one.is_worse_by(fail_if_worse)]
    if worse:
        raise WorseError("\n".join(map(_worse_sentence, worse)))
    return 0


# -- what is compared


def scored_folders(asked: AskedEvals) -> list[Path]:
    """The folders that hold the scores of the models, in their order; those without scores are evaluated first.

    Raises:
        AitrainError: a model cannot be evaluated.
    """
    models, has_options = list(asked.models), bool(asked.flags or asked.config)
    folders = {model: folder for model in models if (folder := _folder(model)) is not None}
    if len(models) == 1 and not (models[0] in folders and _is_scored(folders[models[0]], has_options)):
        models = _with_base(models[0])
    missing = [model for model in models if model not in folders or not _is_scored(folders[model], has_options)]
    if missing:
        like = next(iter(folders.values()), None)
        wanted = list(dict.fromkeys(missing))
        evals = run_evals(AskedEvals(wanted, asked.flags, asked.config, "reuse", asked.verbosity, like))
        folders |= dict(zip(wanted, evals, strict=True))
    return [folders[model] for model in models]


def _folder(model: str) -> Path | None:
    """The run folder that an argument names, None for anything else."""
    from aitrain.runs.run_folder import RUNS
    from aitrain.ui.run_registry import is_run

    return next((path for path in (Path(model).expanduser(), Path(RUNS) / model) if is_run(path)), None)


def _is_scored(folder: Path, has_options: bool) -> bool:
    """Whether the recorded scores are compared: always those of an eval, and those of a run unless options are given.
    A run without a model cannot be evaluated, and has what it has."""
    from aitrain.runs.run_folder import RunFolder, read_object

    run = RunFolder(folder)
    if read_object(run.status).get("job") == "eval":
        return True
    has_scores = any(read_object(run.result).get(name) is not None for name in ("score_after", "greedy_after"))
    return not run.model.is_dir() or (has_scores and not has_options)


def _with_base(model: str) -> list[str]:
    """A tuned model behind the one that its training began with."""
    from aitrain.runs.model_reference import before_training, read_model

    base = before_training(read_model(model))
    if base is None:
        raise ConfigError(f"{model} is one model\nName what it is compared with: aitrain compare A B")
    return [base.given, model]


# -- what is shown


def _write_page(file: Path, comparisons: Sequence[Comparison]) -> None:
    from aitrain.runs.run_folder import write_text
    from aitrain.ui.comparison_view import page_of_comparisons

    try:
        write_text(file, page_of_comparisons(comparisons))
    except OSError as error:
        raise ConfigError(f"--html: cannot write {file}: {error.strerror}") from None


def _print(comparisons: Sequence[Comparison], transcripts: int, detect: float | None) -> None:
    from rich.console import Console

    from aitrain.ui.comparison_view import comparison_texts

    console = Console(highlight=False)
    page(rendered(console, comparison_texts(comparisons, transcripts, detect)))


def _worse_sentence(comparison: Comparison) -> str:
    from aitrain.runs.held_out import interval_text

    change = interval_text(comparison.main.change, True)
    return f"{comparison.b.label} is worse than {comparison.a.label}: {change}"
