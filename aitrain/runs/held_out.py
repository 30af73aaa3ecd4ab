"""The scores of the held-out cases before and after, with intervals: computed here for result.json, and shown from
there by the terminal, the model card and the page.

A scoring is the scores of each case's samples. Its mean is that of the cases' means. pass@K is the mean chance that at
least one of K samples of a case is solved, that is, has the highest score that there can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias, TypedDict

from aitrain.options.value_types import score_bounds
from aitrain.runs.intervals import UNIT, Bounds, Interval, of_change, of_mean
from aitrain.runs.json_values import as_float, as_int

Scoring: TypeAlias = Mapping[str, Sequence[float]]
"""The scores of the samples of each case, by the number of its row; samples that could not be scored are left out."""


class IntervalValues(TypedDict):
    """An interval as JSON has it; without limits and a count where only the mean is known."""

    mean: float
    low: float | None
    high: float | None
    count: int | None


class ScoreRow(TypedDict):
    """The held-out scores of one way to decode, and the change of the cases that both have."""

    before: IntervalValues | None
    after: IntervalValues | None
    change: IntervalValues | None


ScoreTable: TypeAlias = dict[str, ScoreRow]
"""By `sampled`, `greedy` and, where cases have K samples, `pass@K`."""

DECODINGS = ("sampled", "greedy")
NEARLY = 1e-9
"""Part of the range that a solved case's score may be below its end, for rounding."""


def by_case(scored: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """A scoring of (case, score) pairs."""
    scoring: dict[str, list[float]] = {}
    for case, score in scored:
        scoring.setdefault(case, []).append(score)
    return scoring


def case_means(scoring: Scoring) -> dict[str, float]:
    """One value a case: the mean of its samples."""
    return {case: fmean(scores) for case, scores in scoring.items() if scores}


def mean_score(scoring: Scoring) -> float | None:
    """The mean of the cases' means, None where nothing was scored."""
    means = case_means(scoring)
    return fmean(means.values()) if means else None


def pass_at(scoring: Scoring, tries: int, bounds: Bounds) -> dict[str, float]:
    """For each case with at least `tries` scored samples, the chance that one of so many, drawn from its samples
    without replacement, is solved: the unbiased estimate."""
    solved_from = bounds[1] - NEARLY * (bounds[1] - bounds[0])
    chances = {}
    for case, scores in scoring.items():
        if len(scores) >= tries:
            failed = sum(score < solved_from for score in scores)
            chances[case] = 1 - math.comb(failed, tries) / math.comb(len(scores), tries)
    return chances


def before_and_after(scorings: Mapping[str, Scoring], bounds: Bounds | None, tries: int) -> ScoreTable:
    """The table of scorings that are called `before_sampled` and so on; pass@K where cases have several samples, and
    scores a highest one."""
    table: ScoreTable = {}
    for decoding in DECODINGS:
        before, after = scorings.get(f"before_{decoding}", {}), scorings.get(f"after_{decoding}", {})
        table[decoding] = _row(case_means(before), case_means(after), bounds)
        if decoding == "sampled" and tries > 1 and bounds is not None:
            table[f"pass@{tries}"] = _row(pass_at(before, tries, bounds), pass_at(after, tries, bounds), UNIT)
    return table


def _row(before: Mapping[str, float], after: Mapping[str, float], bounds: Bounds | None) -> ScoreRow:
    return {
        "before": as_values(of_mean(before.values(), bounds)),
        "after": as_values(of_mean(after.values(), bounds)),
        "change": as_values(of_change(before, after, bounds)),
    }


def as_values(interval: Interval | None) -> IntervalValues | None:
    """An interval as JSON has it."""
    if interval is None:
        return None
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "count": interval.count}


def recorded_table(value: object) -> ScoreTable | None:
    """`scores` of a result.json; None where there is none."""
    if not isinstance(value, dict):
        return None
    rows = {str(name): row for name, row in value.items() if isinstance(row, dict)}
    return {
        name: {
            "before": _recorded_interval(row.get("before")),
            "after": _recorded_interval(row.get("after")),
            "change": _recorded_interval(row.get("change")),
        }
        for name, row in rows.items()
    }


def _recorded_interval(value: object) -> IntervalValues | None:
    mean = as_float(value.get("mean")) if isinstance(value, dict) else None
    if mean is None or not isinstance(value, dict):
        return None
    low, high = as_float(value.get("low")), as_float(value.get("high"))
    return {"mean": mean, "low": low, "high": high, "count": as_int(value.get("count"))}


def bounds_of(score_range: object) -> Bounds | None:
    """The lowest and the highest score, by the option rl_score_range; None where there are none, for `any`. 0 and 1 in
    runs that have no such option."""
    low, high = (score_bounds(score_range) if isinstance(score_range, str) else None) or UNIT
    return (low, high) if math.isfinite(high - low) else None


def interval_texts(row: ScoreRow) -> tuple[str, str, str]:
    """The intervals before and after, and of the change, as text."""
    return interval_text(row["before"], False), interval_text(row["after"], False), interval_text(row["change"], True)


def interval_text(value: IntervalValues | None, is_change: bool) -> str:
    """`0.612 [0.482, 0.728]`, with signs for a change."""
    if value is None:
        return "-"
    sign = "+" if is_change else ""
    mean = f"{value['mean']:{sign}.3f}"
    if value["low"] is None:
        return mean
    return f"{mean} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
