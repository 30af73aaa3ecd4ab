"""The result of a sweep as text: a table of its trials, the best one, and the commands to continue with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

from aitrain.runs.held_out import interval_text
from aitrain.runs.sweep_record import SweepRecord, Trial
from aitrain.ui.duration import duration
from aitrain.ui.escape_controls import escape_controls

WIDEST = 24
"""Columns of a value in the table."""
MORE_STEPS = 4
"""Factor of steps in the command that trains longer with the best options."""


def shown_value(value: object) -> str:
    """A value of an option: a number with four significant digits, anything else as JSON or as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape_controls(value if isinstance(value, str) else json.dumps(value))


def values_text(values: Mapping[str, object]) -> str:
    """`lr 0.0004  lora_r 16`."""
    return "  ".join(f"{name} {shown_value(value)}" for name, value in values.items())


def trial_line(trial: Trial) -> str:
    """How a trial ended: `0.612 [0.482, 0.728]`, or why it has no score."""
    if trial.score is not None:
        return score_text(trial)
    last = f" at {trial.scores[max(trial.scores)]:.3f} after step {max(trial.scores)}" if trial.scores else ""
    why = f": {escape_controls(trial.error.splitlines()[0].rstrip('.'))}" if trial.error else ""
    return f"{trial.status}{last}{why}"


def score_text(trial: Trial) -> str:
    """The score of a trial with its interval."""
    return interval_text(trial.interval, False) if trial.interval else f"{trial.score:.3f}"


def table(record: SweepRecord) -> list[str]:
    """The trials, the best first, as lines with a head."""
    names = list(dict.fromkeys(name for trial in record.trials for name in trial.values))
    rows = [["trial", *names, "before", "score after training"]]
    for trial in record.ranked:
        values = [shown_value(trial.values.get(name))[:WIDEST] for name in names]
        before = "-" if trial.before is None else f"{trial.before:.3f}"
        rows.append([str(trial.number), *values, before, trial_line(trial)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def next_commands(record: SweepRecord) -> dict[str, str]:
    """Commands for the best trial by what they do; empty if there is none."""
    best = record.best
    if best is None:
        return {}
    run = record.folder / best.name
    steps = ["--max-steps", str(MORE_STEPS * best.steps)] if best.steps else []
    longer = ["--project-name", f"{record.folder.name}-best", "--output-dir", str(record.folder.parent)]
    return {
        "confirm": shlex.join(["aitrain", "eval", str(run), "--samples", "8"]),
        "train_longer": shlex.join(["aitrain", "grpo", "--config", str(run / "config.yaml"), *longer, *steps]),
    }


def result_lines(record: SweepRecord) -> Iterator[str]:
    """The table, the best trial, and what to do next."""
    yield from table(record)
    best, commands = record.best, next_commands(record)
    counts = {name: record.count(name) for name in ("finished", "pruned", "failed", "stopped")}
    seconds = sum(trial.seconds or 0.0 for trial in record.trials)
    yield ""
    yield ", ".join(f"{count} {name}" for name, count in counts.items() if count) + f"; {duration(seconds)} of training"
    if best is None:
        yield "No trial has a score: there is no best one."
        return
    yield f"best: {best.name} with {values_text(best.values)}: {score_text(best)}"
    yield bias_note(record)
    yield f"  {commands['confirm']}"
    yield "train longer with its options:"
    yield f"  {commands['train_longer']}"


def bias_note(record: SweepRecord) -> str:
    """What the score of the best trial does not say, before the command that scores it again."""
    if (count := record.count("finished")) < 2:
        return "Score it again with new samples:"
    return (
        f"The best of {count} scores is biased upwards: part of it is chance, and its interval does not know of the"
        " choice. Score it again with new samples:"
    )
