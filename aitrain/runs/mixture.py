"""Held-out scores of a run with several environments: those of each, and their weighted mean.

A mean score over the environments is the sum of each one's mean, times its share. Its interval is made of theirs: the
distances to each limit, times the shares, are added as squares (MOVER; G. Zou and A. Donner, Statistics in Medicine,
2008). An environment without a scored case is left out, and the shares of the others grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict, TypeVar

from aitrain.runs.held_out import (
    DECODINGS,
    IntervalValues,
    ScoreTable,
    Scoring,
    as_values,
    before_and_after,
    bounds_of,
    case_means,
    change_values,
    pass_at,
)
from aitrain.runs.held_out import mean_score as plain_mean_score
from aitrain.runs.intervals import UNIT, Bounds, Interval, of_change, of_mean
from aitrain.runs.json_values import JsonObject, as_float, as_object
from aitrain.runs.significance import sign_flip_p_value
from aitrain.runs.verdict import Verdict, verdict_of

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


class EnvResult(TypedDict):
    """One environment of several in a result.json; its scores are rows of `scores`, such as `sampled, NAME`."""

    share: float
    train_cases: int
    eval_cases: int
    verdict: Verdict | None


def mean_score(scoring: Scoring, mixture: Mixture) -> float | None:
    """Mean of the cases' means, or the weighted mean of the environments'; None if nothing was scored."""
    if not mixture:
        return plain_mean_score(scoring)
    means = [(one.share, mean) for one in mixture if (mean := plain_mean_score(one.part(scoring))) is not None]
    return sum(share * mean for share, mean in means) / sum(share for share, _ in means) if means else None


def interval_of_mean(scoring: Scoring, mixture: Mixture, bounds: Bounds | None) -> Interval | None:
    """The interval of `mean_score`."""
    return of_means(case_means(scoring), mixture, bounds)


def of_means(means: Mapping[str, float], mixture: Mixture, bounds: Bounds | None) -> Interval | None:
    """The mean of the cases' means with its interval."""
    if not mixture:
        return of_mean(means.values(), bounds)
    found = ((one.share, of_mean(one.part(means).values(), one.bounds)) for one in mixture)
    return combined([(share, interval) for share, interval in found if interval is not None])


def of_changes(
    before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture, bounds: Bounds | None
) -> IntervalValues | None:
    """The mean change of the cases that have both scores, with its interval and its p-value; None without a case."""
    if not mixture:
        return change_values(before, after, bounds)
    found = ((one.share, of_change(one.part(before), one.part(after), one.bounds)) for one in mixture)
    change = as_values(combined([(share, interval) for share, interval in found if interval is not None]))
    if change is not None:
        change["p_value"] = sign_flip_p_value(list(_weighted_changes(before, after, mixture)))
    return change


def _weighted_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> Iterator[float]:
    """The changes of the cases, in the proportion in which they count in the change of the weighted mean."""
    for one in mixture:
        changes = [after[case] - before[case] for case in one.part(before) if case in after]
        yield from (one.share * change / len(changes) for change in changes)


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


def score_table(scorings: Mapping[str, Scoring], mixture: Mixture, bounds: Bounds | None, tries: int) -> ScoreTable:
    """The table of scorings named `before_sampled` and so on; with several environments, also a row for each of them,
    such as `sampled, NAME`."""
    if not mixture:
        return before_and_after(scorings, bounds, tries)
    each = {
        one.name: before_and_after({name: one.part(found) for name, found in scorings.items()}, one.bounds, tries)
        for one in mixture
    }
    table: ScoreTable = {}
    for row in dict.fromkeys(row for own in each.values() for row in own):
        own_mixture, values = (
            mixture,
            {phase: case_means(scorings.get(f"{phase}_{row}", {})) for phase in ("before", "after")},
        )
        if row not in DECODINGS:  # pass@K, of the environments whose scores have bounds
            own_mixture = tuple(replace(one, bounds=UNIT) for one in mixture if one.bounds is not None)
            values = {
                phase: _chances(scorings.get(f"{phase}_sampled", {}), mixture, tries) for phase in ("before", "after")
            }
        table[row] = {
            "before": as_values(of_means(values["before"], own_mixture, None)),
            "after": as_values(of_means(values["after"], own_mixture, None)),
            "change": of_changes(values["before"], values["after"], own_mixture, None),
        }
        table |= {f"{row}, {one.name}": each[one.name][row] for one in mixture if row in each[one.name]}
    return table


def _chances(scoring: Scoring, mixture: Mixture, tries: int) -> dict[str, float]:
    """`pass_at` of the cases of all environments whose scores have bounds."""
    bounded = [(one, one.bounds) for one in mixture if one.bounds is not None]
    chances: dict[str, float] = {}
    for one, bounds in bounded:
        chances |= pass_at(one.part(scoring), tries, bounds)
    return chances


def env_results(table: ScoreTable, mixture: Mixture) -> dict[str, EnvResult]:
    """What result.json says of each environment, beside its rows of the table."""
    return {
        one.name: {
            "share": one.share,
            "train_cases": one.train_cases,
            "eval_cases": len(one.cases),
            "verdict": verdict_of(table[f"sampled, {one.name}"]["change"]),
        }
        for one in mixture
    }


def recorded_mixture(environment: JsonObject, env_of: Mapping[str, str]) -> Mixture:
    """The environments that an environment.json names, given the environment of each held-out case."""
    return tuple(
        ScoredEnv(
            name,
            as_float(as_object(facts).get("share")) or 1.0,
            bounds_of(as_object(facts).get("score_range")),
            frozenset(case for case, own in env_of.items() if own == name),
        )
        for name, facts in as_object(environment.get("environments")).items()
    )
