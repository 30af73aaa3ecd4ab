"""Held-out scores of a run, whether it has one environment or several.

A mean score over several environments is the sum of each one's mean, times its share. Its interval is made of theirs:
the distances to each limit, times the shares, are added as squares (MOVER; G. Zou and A. Donner, Statistics in
Medicine, 2008). An environment without a scored case is left out, and the shares of the others grow.

Cases with an equal prompt count as one, with the mean of their values: they say little more than one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeAlias, TypedDict, TypeVar

from aitrain.runs.held_out import (
    DECODINGS,
    IntervalValues,
    ScoreTable,
    Scoring,
    as_values,
    bounds_of,
    case_means,
    pass_at,
)
from aitrain.runs.intervals import UNIT, Bounds, Interval, of_change, of_mean
from aitrain.runs.json_values import JsonObject, as_float, as_object
from aitrain.runs.significance import sign_flip_p_value
from aitrain.runs.verdict import Verdict, verdict_of

T = TypeVar("T")


@dataclass(frozen=True)
class ScoredEnv:
    """An environment: its share of the score, and its held-out cases."""

    name: str = ""
    """Empty for the only one."""
    share: float = 1.0
    """Of 1."""
    bounds: Bounds | None = UNIT
    prompts: Mapping[str, str] = field(default_factory=dict)
    """The `prompt_key` of each of its cases, by row number."""
    train_cases: int = 0

    def part(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values of its own cases."""
        return {case: value for case, value in values.items() if case in self.prompts}

    def by_prompt(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean value of its cases with each prompt; where all have the same, what they ask is in their rows, and
        each case counts."""
        if len(set(self.prompts.values())) < 2:
            return self.part(values)
        found: dict[str, list[float]] = {}
        for case, value in self.part(values).items():
            found.setdefault(self.prompts[case], []).append(value)
        return {prompt: fmean(each) for prompt, each in found.items()}


Mixture: TypeAlias = tuple[ScoredEnv, ...]
"""The environments of a run: one without a name, or several."""


class EnvResult(TypedDict):
    """One environment of several in a result.json; its scores are rows of `scores`, such as `sampled, NAME`."""

    share: float
    train_cases: int
    eval_cases: int
    verdict: Verdict | None


def named(mixture: Mixture) -> Mixture:
    """The environments, if there are several."""
    return tuple(one for one in mixture if one.name)


def cases_of(mixture: Mixture) -> int:
    """How many cases there are, those with an equal prompt counted as one."""
    return sum(len(one.by_prompt(dict.fromkeys(one.prompts, 0.0))) for one in mixture)


def bounds_of_mean(mixture: Mixture) -> Bounds | None:
    """The lowest and the highest weighted mean; None if an environment has no bounds."""
    bounds = [(one.share, one.bounds) for one in mixture if one.bounds is not None]
    if len(bounds) < len(mixture):
        return None
    return sum(share * low for share, (low, _) in bounds), sum(share * high for share, (_, high) in bounds)


# -- means and changes of values, one a case


def mean_score(scoring: Scoring, mixture: Mixture) -> float | None:
    """The weighted mean of the environments' mean scores; None if nothing was scored."""
    found = interval_of_mean(scoring, mixture)
    return None if found is None else found.mean


def interval_of_mean(scoring: Scoring, mixture: Mixture) -> Interval | None:
    """The mean score with its interval."""
    return of_means(case_means(scoring), mixture)


def of_means(means: Mapping[str, float], mixture: Mixture) -> Interval | None:
    """The mean of the cases' values with its interval."""
    return combined((one.share, of_mean(one.by_prompt(means).values(), one.bounds)) for one in mixture)


def of_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> IntervalValues | None:
    """The mean change of the cases that have both values, with its interval and its p-value; None without a case."""
    change = as_values(interval_of_change(before, after, mixture))
    if change is not None:
        change["p_value"] = sign_flip_p_value(weighted_changes(before, after, mixture))
    return change


def interval_of_change(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> Interval | None:
    """The mean change of the cases that have both values, with its interval."""
    pairs = [(one, *_in_both(before, after, one)) for one in mixture]
    return combined((one.share, of_change(first, second, one.bounds)) for one, first, second in pairs)


def weighted_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> list[float]:
    """The changes of the cases that have both values, each times its weight: their mean is that of the mixture."""
    pairs = [(one.share, *_in_both(before, after, one)) for one in mixture]
    count = sum(len(first) for _, first, _ in pairs)
    total = sum(share for share, first, _ in pairs if first)
    return [
        (second[case] - first[case]) * share / total * count / len(first)
        for share, first, second in pairs
        for case in first
    ]


def _in_both(
    before: Mapping[str, float], after: Mapping[str, float], one: ScoredEnv
) -> tuple[dict[str, float], dict[str, float]]:
    """The values of an environment's cases that have one before and after, by prompt."""
    both = [case for case in before if case in after]
    return one.by_prompt({case: before[case] for case in both}), one.by_prompt({case: after[case] for case in both})


def weighted_mean(parts: Sequence[tuple[float, float]]) -> float | None:
    """The mean of numbers, given with their shares; None without any."""
    return sum(share * number for share, number in parts) / sum(share for share, _ in parts) if parts else None


def combined(parts: Iterable[tuple[float, Interval | None]]) -> Interval | None:
    """The interval of a weighted mean, given shares and intervals; None without any."""
    found = [(share, interval) for share, interval in parts if interval is not None]
    if len(found) < 2:
        return found[0][1] if found else None
    total = sum(share for share, _ in found)
    shared = [(share / total, interval) for share, interval in found]
    mean = sum(share * one.mean for share, one in shared)
    count = sum(one.count for _, one in shared)
    below = [share * (one.mean - one.low) for share, one in shared if one.low is not None]
    above = [share * (one.high - one.mean) for share, one in shared if one.high is not None]
    if len(below) < len(shared) or len(above) < len(shared):
        return Interval(mean, None, None, count)
    return Interval(mean, mean - math.hypot(*below), mean + math.hypot(*above), count)


# -- pass@K


def can_be_solved(mixture: Mixture) -> Mixture:
    """The environments whose scores have bounds, for chances of solving a case."""
    return tuple(replace(one, bounds=UNIT) for one in mixture if one.bounds is not None)


def chances(scoring: Scoring, tries: int, mixture: Mixture) -> dict[str, float]:
    """`pass_at` of the cases of all environments whose scores have bounds."""
    found: dict[str, float] = {}
    for one in mixture:
        if one.bounds is not None:
            found |= pass_at(one.part(scoring), tries, one.bounds)
    return found


# -- the table of a run


def score_table(scorings: Mapping[str, Scoring], mixture: Mixture, tries: int) -> ScoreTable:
    """The table of scorings named `before_sampled` and so on, with pass@K if cases have several samples; with several
    environments, also a row for each of them, such as `sampled, NAME`."""
    table: ScoreTable = {}
    for decoding in DECODINGS:
        ends = [scorings.get(f"{phase}_{decoding}", {}) for phase in ("before", "after")]
        _add_rows(table, decoding, [case_means(end) for end in ends], mixture)
        solvable = can_be_solved(mixture)
        if decoding == "sampled" and tries > 1 and solvable:
            _add_rows(table, f"pass@{tries}", [chances(end, tries, mixture) for end in ends], solvable)
    return table


def _add_rows(table: ScoreTable, name: str, ends: list[dict[str, float]], mixture: Mixture) -> None:
    before, after = ends
    for row, envs in ((name, mixture), *((f"{name}, {one.name}", (one,)) for one in named(mixture))):
        table[row] = {
            "before": as_values(of_means(before, envs)),
            "after": as_values(of_means(after, envs)),
            "change": of_changes(before, after, envs),
        }


def env_results(table: ScoreTable, mixture: Mixture) -> dict[str, EnvResult]:
    """What result.json says of each environment, beside its rows of the table."""
    return {
        one.name: {
            "share": one.share,
            "train_cases": one.train_cases,
            "eval_cases": len(one.prompts),
            "verdict": verdict_of(table[f"sampled, {one.name}"]["change"]),
        }
        for one in named(mixture)
    }


def recorded_mixture(environment: JsonObject, options: JsonObject, cases: Mapping[str, tuple[str, str]]) -> Mixture:
    """The environments of a run folder, by its environment.json and its options, given the environment and the prompt
    of each held-out case."""
    several = as_object(environment.get("environments"))
    if not several:
        prompts = {case: prompt for case, (_, prompt) in cases.items()}
        return (ScoredEnv(bounds=bounds_of(options.get("rl_score_range")), prompts=prompts),)
    return tuple(
        ScoredEnv(
            name,
            as_float(as_object(facts).get("share")) or 1.0,
            bounds_of(as_object(facts).get("score_range")),
            {case: prompt for case, (own, prompt) in cases.items() if own == name},
        )
        for name, facts in several.items()
    )
