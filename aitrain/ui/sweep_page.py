"""The result of a sweep: as text for the terminal, and as the page sweep.html."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial

from aitrain.errors import ConfigError
from aitrain.runs.held_out import interval_text
from aitrain.runs.run_folder import SWEEP_LOG, write_text
from aitrain.ui.output import escape_controls
from aitrain.ui.page import rendered

PAGE = "sweep.html"
STUDY = "sweep"
"""Name of the study in the journal."""


def open_study(folder: Path, is_new: bool = False) -> Study:
    """The study in the folder of a sweep.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not is_new and not (folder / SWEEP_LOG).is_file():
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no {SWEEP_LOG}")
    try:
        storage = JournalStorage(JournalFileBackend(str(folder / SWEEP_LOG)))
        if is_new:
            return optuna.create_study(study_name=STUDY, storage=storage, direction="maximize")
        return optuna.load_study(study_name=STUDY, storage=storage)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / SWEEP_LOG} is damaged: {error}") from None


def trial_name(number: int) -> str:
    """Name of a trial's run folder."""
    return f"trial-{number}"


def best_trial(study: Study) -> FrozenTrial | None:
    """The finished trial with the best score; the first of equal ones."""
    return next(iter(study.best_trials), None)


def ranked(study: Study) -> list[FrozenTrial]:
    """The trials, the best first, then those without a score in their order."""
    return sorted(study.get_trials(), key=lambda trial: (trial.value is None, -(trial.value or 0.0)))


def values_text(values: Mapping[str, object]) -> str:
    """`lr 0.0004  lora_r 16`."""
    return "  ".join(f"{name} {_value_text(value)}" for name, value in values.items())


def outcome(trial: FrozenTrial) -> str:
    """The score of a trial with its interval, `0.612 [0.482, 0.728]`, or why it has none."""
    if trial.value is not None:
        return interval_text(trial.user_attrs["interval"])
    error = trial.user_attrs.get("error", "")
    why = f": {escape_controls(error.splitlines()[0].rstrip('.'))}" if error else ""
    return f"failed{why}"


def table(trials: Sequence[FrozenTrial]) -> list[list[str]]:
    """Trials as rows of cells below a row of titles."""
    names = list(trials[0].params) if trials else []
    rows = [["trial", *names, "before", "score after training"]]
    for trial in trials:
        values = [_value_text(trial.params[name]) for name in names]
        before = trial.user_attrs.get("before")
        rows.append([str(trial.number), *values, "-" if before is None else f"{before:.3f}", outcome(trial)])
    return rows


def best_lines(study: Study, folder: Path) -> Iterator[str]:
    """The best trial, what its score does not say, and the command that scores it again."""
    best = best_trial(study)
    if best is None:
        yield "No trial has a score: there is no best one."
        return
    yield f"best: {trial_name(best.number)} with {values_text(best.params)}: {outcome(best)}"
    yield (
        "The best of several scores is biased upwards: part of it is chance, and its interval does not know of the"
        " choice. Score it again with new samples:"
    )
    yield f"  aitrain eval {shlex.quote(str(folder / trial_name(best.number)))} --samples 8"


def write_page(study: Study, folder: Path) -> None:
    """Write sweep.html into the sweep's folder."""
    write_text(folder / PAGE, sweep_page(study, folder), durable=False)


def sweep_page(study: Study, folder: Path) -> str:
    """The page of a sweep: its result, Optuna's plots, and its trials. It loads nothing."""
    from plotly.offline import get_plotlyjs  # here, because the terminal does not need it

    trials, figures = ranked(study), _figures(study)
    head, *rows = table(trials)
    return rendered(
        "sweep.html",
        ("page.css", "comparison.css"),
        ("theme.js", "sweep.js"),
        figures,
        libraries=[get_plotlyjs()],
        title=folder.name,
        best="\n".join(best_lines(study, folder)),
        figures=figures,
        head=head,
        rows=[(f"{trial_name(trial.number)}/report.html", cells) for trial, cells in zip(trials, rows, strict=True)],
    )


def _figures(study: Study) -> list[object]:
    """Optuna's plots as values for JSON, with room for their labels on a narrow screen as well."""
    from optuna import visualization

    figures = {
        "Score by option": visualization.plot_slice(study),
        "Score by trial": visualization.plot_optimization_history(study),
    }
    room = {"legend": {"orientation": "h", "y": -0.25}, "margin": {"l": 48, "r": 16, "t": 48, "b": 48}}
    for title, figure in figures.items():
        figure.update_layout(title=title, yaxis_title="score", template="plotly_white", **room)
        figure.update_xaxes(dtick=1, exponentformat="e", selector={"type": "log"})
        figure.update_traces(marker_showscale=False, marker_color="#2f6fde")
    return [json.loads(figure.to_json()) for figure in figures.values()]


def _value_text(value: object) -> str:
    """A number with four significant digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else escape_controls(str(value))
