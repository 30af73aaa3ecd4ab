"""Held-out scores of a run with several environments: those of each, and their weighted mean.

A mean score over the environments is the sum of each one's mean, times its share. Its interval is made of theirs: the
distances to each limit, times the shares, are added as squares (MOVER; G. Zou and A. Donner, Statistics in Medicine,
2008). An environment without a scored case is left out, and the shares of the others grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, TypeVar

from aitrain.runs.held_out import (
    DECODINGS,
    IntervalValues,
    ScoreRow,
    ScoreTable,
    Scoring,
    as_values,
    before_and_after,
    case_means,
)
from aitrain.runs.held_out import mean_score as plain_mean_score
from aitrain.runs.intervals import Bounds, Interval, of_mean
from aitrain.runs.significance import sign_flip_p_value
from aitrain.runs.verdict import Verdict, verdict_of_scores

T = TypeVar("T")


@dataclass(frozen=True)
class ScoredEnv:
    """One of several environments: its share of the score, and its held-out cases."""

    name: str
    share: float
    """Of 1."""
    bounds: Bounds | None
    cases: frozenset[str]
    """Their row numbers."""
    train_cases: int = 0

    def part(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values of its own cases."""
        return {case: value for case, value in values.items() if case in self.cases}


Mixture: TypeAlias = tuple[ScoredEnv, ...]
"""The environments of a run; empty for a single one."""


class EnvScores(TypedDict):
    """The result of one environment of several."""

    share: float
    eval_cases: int
    train_cases: int
    scores: ScoreTable
    verdict: Verdict | None


def mean_score(scoring: Scoring, mixture: Mixture) -> float | None:
    """Mean of the cases' means, or the weighted mean of the environments'; None if nothing was scored."""
    if not mixture:
        return plain_mean_score(scoring)
    means = [(one.share, mean) for one in mixture if (mean := plain_mean_score(one.part(scoring))) is not None]
    return sum(share * mean for share, mean in means) / sum(share for share, _ in means) if means else None


def interval_of_mean(scoring: Scoring, mixture: Mixture, bounds: Bounds | None) -> Interval | None:
    """The interval of `mean_score`."""
    if not mixture:
        return of_mean(case_means(scoring).values(), bounds)
    found = ((one.share, of_mean(case_means(one.part(scoring)).values(), one.bounds)) for one in mixture)
    return combined([(share, interval) for share, interval in found if interval is not None])


def combined(parts: list[tuple[float, Interval]]) -> Interval | None:
    """The interval of a weighted mean, given shares and intervals; None without any."""
    if not parts:
        return None
    total = sum(share for share, _ in parts)
    shared = [(share / total, interval) for share, interval in parts]
    mean = sum(share * one.mean for share, one in shared)
    count = sum(one.count for _, one in shared)
    below = [share * (one.mean - one.low) for share, one in shared if one.low is not None]
    above = [share * (one.high - one.mean) for share, one in shared if one.high is not None]
    if len(below) < len(shared) or len(above) < len(shared):
        return Interval(mean, None, None, count)
    return Interval(mean, mean - math.hypot(*below), mean + math.hypot(*above), count)


def tables(
    scorings: Mapping[str, Scoring], mixture: Mixture, bounds: Bounds | None, tries: int
) -> tuple[ScoreTable, dict[str, EnvScores]]:
    """The table of scorings named `before_sampled` and so on, and those of each environment if there are several."""
    if not mixture:
        return before_and_after(scorings, bounds, tries), {}
    each: dict[str, EnvScores] = {}
    for one in mixture:
        own = before_and_after({name: one.part(found) for name, found in scorings.items()}, one.bounds, tries)
        each[one.name] = {
            "share": one.share,
            "eval_cases": len(one.cases),
            "train_cases": one.train_cases,
            "scores": own,
            "verdict": verdict_of_scores(own),
        }
    table: ScoreTable = {}
    for name in dict.fromkeys(row for own in each.values() for row in own["scores"]):
        rows = [(one.share, each[one.name]["scores"].get(name)) for one in mixture]
        table[name] = _weighted([(share, row) for share, row in rows if row is not None])
    for decoding in DECODINGS:
        if change := table[decoding]["change"]:
            change["p_value"] = _p_value(scorings, mixture, decoding)
    return table, each


def _weighted(rows: list[tuple[float, ScoreRow]]) -> ScoreRow:
    def of(column: Iterable[tuple[float, IntervalValues | None]]) -> IntervalValues | None:
        return as_values(combined([(share, _interval(value)) for share, value in column if value is not None]))

    return {
        "before": of((share, row["before"]) for share, row in rows),
        "after": of((share, row["after"]) for share, row in rows),
        "change": of((share, row["change"]) for share, row in rows),
    }


def _interval(value: IntervalValues) -> Interval:
    return Interval(value["mean"], value["low"], value["high"], value["count"] or 0)


def _p_value(scorings: Mapping[str, Scoring], mixture: Mixture, decoding: str) -> float | None:
    before, after = (case_means(scorings.get(f"{phase}_{decoding}", {})) for phase in ("before", "after"))
    return sign_flip_p_value(list(weighted_changes(before, after, mixture)))


def weighted_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> Iterator[float]:
    """The changes of the cases, in the proportion in which they count in the change of the weighted mean."""
    for one in mixture:
        changes = [after[case] - before[case] for case in one.part(before) if case in after]
        yield from (one.share * change / len(changes) for change in changes)
