"""`aitrain compare`: models on the same cases, case by case. Models without recorded scores are evaluated first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.eval import SHOWN, AskedEvals, run_evals
from aitrain.cli.flags import (
    AsJson,
    ConfigFile,
    Debug,
    Flag,
    Quiet,
    Verbose,
    Verbosity,
    given_flags,
    print_json,
    run_names,
    with_options,
)
from aitrain.errors import ConfigError, WorseError
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.model_reference import before_training, read_model
from aitrain.runs.run_folder import RUNS, RunFolder, read_object, write_text


@with_options(EvalConfig, SHOWN)
def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B...", autocompletion=run_names, help="Run folders, evals, or models as for aitrain eval."
        ),
    ] = None,
    config: ConfigFile = None,
    *,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MARGIN",
            help="Exit with code 4 if B is worse than A, by more than MARGIN at the interval's upper limit; 0: at all.",
        ),
    ] = None,
    detect: Annotated[
        float | None, typer.Option(help="Difference to compute the number of cases for; unset: the measured one.")
    ] = None,
    transcripts: Annotated[
        int, typer.Option(min=0, help="Lost cases and won cases that are shown with transcripts, of each kind.")
    ] = 2,
    html: Annotated[Path | None, typer.Option(help="Write a page with the cases into this file.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **flags: Flag,
) -> int:
    """Compare models on the same cases: is B better than A, on which cases, and how sure is that?

    With one run: its model before training and the one after. A run is compared by the scores after its training; a
    model without scores is evaluated first, with the options of the first run or eval among them. With an option of
    aitrain eval, the models of runs are evaluated as well.
    """
    from rich.console import Console

    from aitrain.cli.show import page
    from aitrain.runs.comparison import compare_all
    from aitrain.runs.held_out import interval_text
    from aitrain.runs.recorded_scoring import read_scorings
    from aitrain.ui.comparison_view import comparison_texts, page_of_comparisons

    if not models:
        raise ConfigError("Name what is compared: aitrain compare RUN, or aitrain compare A B")
    for flag, number in (("--fail-if-worse", fail_if_worse), ("--detect", detect)):
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"{flag} {number}: give a difference of two scores, such as 0.05")
    given = given_flags(flags)
    asked = AskedEvals(models, given, config, "reuse", Verbosity(quiet, verbose, debug))
    comparisons = compare_all(read_scorings(scored_folders(asked)))
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


# -- what is compared


def scored_folders(asked: AskedEvals) -> list[Path]:
    """The folders that hold the scores of the models, in their order; those without scores are evaluated first.

    Always compared are the scores of an eval, those of a run only where no options are given. A run without a model
    cannot be evaluated, and has what it has.

    Raises:
        AitrainError: a model cannot be evaluated.
    """
    from aitrain.ui.run_registry import is_run

    models, has_options = list(asked.models), bool(asked.flags or asked.config)
    folders, scored = dict[str, Path](), set[str]()
    for model in models:
        if folder := next(filter(is_run, (Path(model).expanduser(), Path(RUNS) / model)), None):
            folders[model], run = folder, RunFolder(folder)
            result = read_object(run.result)
            has_scores = any(result.get(name) is not None for name in ("score_after", "greedy_after"))
            is_eval = read_object(run.status).get("job") == "eval"
            if is_eval or not run.model.is_dir() or (has_scores and not has_options):
                scored.add(model)
    if len(models) == 1 and not scored:  # a tuned model is compared with the one that its training began with
        base = before_training(read_model(models[0]))
        if base is None:
            raise ConfigError(f"{models[0]} is one model\nName what it is compared with: aitrain compare A B")
        models.insert(0, base.given)
    missing = list(dict.fromkeys(model for model in models if model not in scored))
    if missing:
        like = next(iter(folders.values()), None)
        evals = run_evals(AskedEvals(missing, asked.flags, asked.config, "reuse", asked.verbosity, like))
        folders |= dict(zip(missing, evals, strict=True))
    return [folders[model] for model in models]
