"""Ends a training by its held-out scores: `--until`, `--patience`, and what it took to reach the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from aitrain.runs.held_out import IntervalValues
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.statistics import Mixture, bounds_of_mean, cases_of, combined, of_mean, smallest


class TimeToTarget(TypedDict):
    """The first evaluation that reached `--until`, and what the training had taken by then."""

    target: float
    steps: int
    seconds: float | None
    """Seconds of training, evaluations included, over all parts of a resumed run."""
    tokens: int | None
    """Tokens sampled in training."""
    score: float | None
    low: float
    """Lower limit of the score's interval."""


def time_to_target(until: float, scorings: Sequence[MetricsLine]) -> TimeToTarget | None:
    """The first of the evaluations whose interval begins at or above `until`; None if there is none."""
    for line in scorings:
        if line.eval_low is not None and line.eval_low >= until:
            return {
                "target": until,
                "steps": line.step,
                "seconds": line.trained_seconds,
                "tokens": line.trained_tokens,
                "score": line.eval_score,
                "low": line.eval_low,
            }
    return None


def reason_to_stop(
    until: float | None, patience: int | None, before: float | None, scorings: Sequence[MetricsLine]
) -> str | None:
    """Why the training ends after the last of these evaluations; None if it goes on."""
    if not scorings:
        return None
    last = scorings[-1]
    if until is not None and time_to_target(until, [last]):
        score, low = last.eval_score, last.eval_low
        return f"the interval of the held-out score {score:.3f} begins at {low:.3f} (--until {until:g})"
    scores = [score for score in (before, *(line.eval_score for line in scorings)) if score is not None]
    since = len(scores) - 1 - scores.index(max(scores)) if scores else 0
    if patience is not None and since >= patience:
        return (
            f"{since} evaluations in a row have not beaten the held-out score {max(scores):.3f} (--patience {patience})"
        )
    return None


def cases_to_reach(until: float, mixture: Mixture) -> int | None:
    """Smallest number of held-out cases of each environment with which perfect scores reach `until`, 0 if the present
    ones do; None if no number does."""
    bounds = bounds_of_mean(mixture)
    if bounds is None or until >= bounds[1]:
        return None

    def reaches(count: int) -> bool:
        best = perfect_score(mixture, count)
        return best is not None and best["low"] is not None and best["low"] >= until

    return 0 if reaches(0) else smallest(reaches, 1)


def perfect_score(mixture: Mixture, count: int = 0) -> IntervalValues | None:
    """The interval of perfect scores on this number of cases of each environment; of the present ones with 0."""
    bounded = [(one, one.bounds[1]) for one in mixture if one.bounds is not None]
    return combined(
        (one.share, of_mean([highest] * (count or cases_of((one,))), one.bounds)) for one, highest in bounded
    )
