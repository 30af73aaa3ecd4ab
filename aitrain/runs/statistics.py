"""Means of scores with 95% confidence intervals, changes with p-values, and how many cases a comparison needs.

**The case is the unit**: cases are drawn from the many that could have been asked, and all samples of one case count as
one value, their mean. So intervals hold for one sample per case and for several, however much those are alike. They
show the variation over cases, not the variation over training runs.

**A mean of scores between two bounds**, mapped to 0 and 1, gets a score interval: all means m with
(mean - m)^2 <= a m (1 - m). With a = z^2 / n that is Wilson's interval, which is right where every case is at a bound.
Other case means vary less than that, so a = t^2 d / n, with Student's t and d the share that their variance is of
m (1 - m): the design effect of a survey. For symmetric scores that is about the t interval; near a bound it leans away
from it, as the data do. It is widened to where Student's interval reaches when it is shifted by the skewness of the
scores (Hall 1992), which a few scores carry that lie far from the rest. It is never wider than Wilson's.

Scores that are all alike, such as those for the form of an answer while none is right, do not show how often others
lie far away, and no interval made of them knows it (Bahadur and Savage 1956). Theirs reaches at least as far towards
each bound, relative to the distance, as Wilson's of values that are all at the other one: as far as cases at that
bound can be so rare that none was drawn. Equal scores have just that interval, so it is never a point.

**A change** between two scorings of the same cases, with every case at a bound, gets Newcombe's (1998) square-and-add
interval, made of the two intervals above and the correlation of the cases. Other changes get the interval of the
cases' own differences, which are from -1 to 1: shifted by their skewness however few they are, as a change is often
large for a few cases and small for the rest, and with the limits of alike scores if those of the cases that have
changed were alike before and are alike after.

**Scores without bounds** get Student's t interval, widened by the shifted one. There is none of one case, nor of equal
ones.

**The p-value** is that of a sign-flip test: if both models were equally good at every case, each difference could as
well have the other sign. It is the share of all choices of signs whose mean is at least as far from 0 as the measured
one. With scores of 0 and 1 and one sample a case, that is McNemar's exact test.

**Several environments**: a mean score is the sum of each one's mean, times its share. Its interval is made of theirs:
the distances to each limit, times the shares, are added as squares (MOVER; G. Zou and A. Donner, Statistics in
Medicine, 2008). An environment without a scored case is left out, and the shares of the others grow. Cases with an
equal prompt count as one, with the mean of their values: they say little more than one of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from aitrain.environment.contract import UNIT, Bounds
from aitrain.runs.held_out import (
    DECODINGS,
    NEARLY,
    IntervalValues,
    ScoreRow,
    ScoreTable,
    Scoring,
    bounds_of,
    grouped,
)
from aitrain.runs.json_values import JsonObject, as_float, as_object

if TYPE_CHECKING:  # numpy is imported where it is used, as light commands import this module
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

Limits = tuple[float, float]

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
FEW_CASES = 16
"""With more cases than this, the skewness of their scores is known well enough to shift an interval by it."""
ALIKE = 0.2
"""Scores are alike if no two differ by more than this share of the range, or if they have two values; differences of
scores, if no two differ by more than half of it."""
PLACES, EQUAL = 12, 1e-12
"""Differences and variances below this, of values between 0 and 1, are rounding, as are further decimal places."""
FEW_DIFFERENCES = 16
"""Up to this many differences other than 0, all choices of signs are tried; beyond, DRAWS of them, unless the
differences have one size."""
DRAWS, BLOCK = 19_999, 500
"""Choices of signs, and those that are drawn at once, for less memory."""
FEWEST_CASES = 6
"""With fewer, no p-value is as small as the one that a verdict needs."""
WANTED_POWER = 0.8
MOST_CASES = 1_000_000


# -- intervals


def of_mean(values: Sequence[float], bounds: Bounds | None = UNIT) -> IntervalValues | None:
    """The mean of the scores of cases, one value a case: the mean of its samples. None without a case."""
    if not values:
        return None
    low, high = bounds or UNIT
    limits = _limits(_shares(values, low, high)) if bounds else _student(values)
    return _interval(values, limits, high - low, low)


def of_change(before: Sequence[float], after: Sequence[float], bounds: Bounds | None = UNIT) -> IntervalValues | None:
    """The mean change of cases, given their scores before and after; None without a case."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    if not changes:
        return None
    low, high = bounds or UNIT
    shares = [_shares(scores, low, high) for scores in (before, after)]
    return _interval(changes, _change_limits(*shares) if bounds else _student(changes), high - low, 0.0)


def _interval(values: Sequence[float], limits: Limits | None, size: float, start: float) -> IntervalValues:
    """The interval with limits that are shares of a range of this size, counted from the start."""
    mean = fmean(values)
    interval: IntervalValues = {"mean": mean, "low": None, "high": None, "count": len(values)}
    if limits is not None:
        low, high = (start + limit * size for limit in limits)
        interval |= {"low": min(mean, low), "high": max(mean, high)}
    return interval


def _shares(scores: Sequence[float], low: float, high: float) -> Array:
    """The scores as shares of the range, without what rounding has added."""
    import numpy as np

    return ((np.array(scores, dtype=np.float64) - low) / (high - low)).clip(0.0, 1.0).round(PLACES)


def _extent(values: Array) -> float:
    """The largest distance of two values, without what rounding adds."""
    return float(values.max() - values.min()) - EQUAL


def _limits(values: Array) -> Limits:
    """Limits of the mean of values from 0 to 1."""
    are_alike = _extent(values) <= ALIKE or len(set(values.tolist())) <= 2
    return _of_spread(values, len(values) > FEW_CASES, are_alike)


def _of_spread(values: Array, is_shifted: bool, are_alike: bool) -> Limits:
    """The score interval by the variance of the values, widened by what else applies, and not beyond Wilson's, which is
    the same for values of 0 and 1."""
    count, mean = len(values), float(values.mean())
    spread = float(values.var(ddof=1)) if _extent(values) > 0 else 0.0
    design = spread and student_quantile(count - 1) ** 2 * spread / (mean * (1 - mean))
    limits = [_score_limits(design / count, mean)]
    if is_shifted and (shifted := _shifted(values)):
        limits.append(shifted)
    if are_alike:
        share = Z * Z / (count + Z * Z)
        limits.append((mean * (1 - share), mean + (1 - mean) * share))
    lowest, highest = _score_limits(Z * Z / count, mean)
    return max(lowest, min(low for low, _ in limits)), min(highest, max(high for _, high in limits))


def _score_limits(a: float, mean: float) -> Limits:
    """All m with (mean - m)^2 <= a m (1 - m)."""
    middle = (mean + a / 2) / (1 + a)
    half = math.sqrt(a * mean * (1 - mean) + a * a / 4) / (1 + a)
    return max(0.0, middle - half), min(1.0, middle + half)


def _change_limits(before: Array, after: Array) -> Limits:
    differences, has_changed = after - before, before != after
    if not {*before.tolist(), *after.tolist()} <= {0.0, 1.0}:
        changed = (before[has_changed], after[has_changed])
        are_alike = _extent(differences) <= ALIKE / 2 or all(_extent(scores) <= ALIKE for scores in changed)
        low, high = _of_spread((1 + differences) / 2, True, are_alike)
        return 2 * low - 1, 2 * high - 1
    old, new = float(before.mean()), float(after.mean())
    together = float(((before - old) * (after - new)).sum())
    together = max(0.0, together - 0.5) if together > 0 else together  # Newcombe's correction
    spreads = len(before) * math.sqrt(old * (1 - old) * new * (1 - new))
    correlation = together / spreads if spreads else 0.0
    (old_low, old_high), (new_low, new_high) = _limits(before), _limits(after)

    def distance(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    change = new - old
    return change - distance(new - new_low, old_high - old), change + distance(old - old_low, new_high - new)


def _student(scores: Sequence[float]) -> Limits | None:
    """Limits of the mean of unbounded values; None if they are equal or there is only one."""
    import numpy as np

    shifted = _shifted(np.array(scores))
    if shifted is None:
        return None
    mean, half = fmean(scores), (shifted[1] - shifted[0]) / 2
    return min(mean - half, shifted[0]), max(mean + half, shifted[1])


def _shifted(values: Array) -> Limits | None:
    """Student's interval of the mean, shifted by the skewness of the values; None if they are equal."""
    count, mean = len(values), float(values.mean())
    deviation = float(values.std(ddof=1)) if count > 1 else 0.0
    if deviation**2 <= EQUAL * max(mean * mean, 1e-6):
        return None
    quantile = student_quantile(count - 1)
    skewness = float((((values - mean) / deviation) ** 3).mean())
    shift = skewness * deviation * (2 * quantile**2 + 1) / (6 * count)
    half = quantile * deviation / math.sqrt(count)
    return mean + shift - half, mean + shift + half


@cache
def student_quantile(freedom: int) -> float:
    """Two-sided quantile of Student's t at LEVEL, for `freedom` degrees of freedom, by adding up its density."""
    import numpy as np

    t, step = np.linspace(0.0, 13.0, 26_001, retstep=True)
    density = (1 + t * t / freedom) ** (-(freedom + 1) / 2)
    density *= math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi * freedom)
    return float(np.interp(LEVEL, np.cumsum(density[1:] + density[:-1]) * step, t[1:]))


# -- p-values


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean of the cases' differences; the same one every time it is computed."""
    import numpy as np

    changed = np.array([difference for difference in differences if difference])
    count, sizes = len(changed), np.abs(changed)
    if not count:
        return 1.0
    if sizes.max() - sizes.min() < EQUAL * sizes.sum():  # the sums are those of a coin
        better = int((changed > 0).sum())
        tail = sum(math.comb(count, heads) for heads in range(min(better, count - better) + 1))
        return min(1.0, 2 * tail / (1 << count))
    measured = abs(changed.sum()) - EQUAL * sizes.sum()
    if count <= FEW_DIFFERENCES:
        sums = np.zeros(1)
        for value in changed:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= measured).mean())
    rng, extreme = np.random.default_rng(0), 0
    for start in range(0, DRAWS, BLOCK):
        signs = rng.choice((-1.0, 1.0), size=(min(BLOCK, DRAWS - start), count))
        extreme += int((np.abs(signs @ changed) >= measured).sum())
    return (1 + extreme) / (1 + DRAWS)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm's method, in the given order."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = highest
    return corrected


# -- power


@dataclass(frozen=True)
class Power:
    """The probability of detecting a difference between two models.

    It is as good as the spread of the cases' differences, which is estimated from a first comparison, and changes with
    the number of samples a case.
    """

    spread: float
    """Standard deviation of the cases' differences."""
    smallest: float
    """The smallest difference other than 0: the test counts a tie as no difference, which costs half a tie of such
    differences on each side."""
    largest: float
    changing: float
    """Share of cases with a difference other than 0: the test needs FEWEST_CASES of them."""

    @classmethod
    def of(cls, differences: Sequence[float]) -> Power | None:
        """The power of comparisons whose cases differ as these do; None if they all differ by the same."""
        sizes = [abs(difference) for difference in differences if difference]
        spread = stdev(differences) if len(differences) > 1 else 0.0
        if not sizes or spread <= EQUAL * max(sizes):
            return None
        return cls(spread, min(sizes), max(sizes), len(sizes) / len(differences))

    def power(self, difference: float, cases: int) -> float:
        """Statistical power: the probability of detecting this true difference with this number of cases."""
        if cases < FEWEST_CASES:
            return 0.0
        few, share = range(FEWEST_CASES), self.changing
        enough = 1 - math.fsum(math.comb(cases, k) * share**k * (1 - share) ** (cases - k) for k in few)
        error = self.spread / math.sqrt(cases)
        distance = (abs(difference) - self.smallest / cases) / error
        return min(enough, NormalDist(student_quantile(cases - 1)).cdf(distance))

    def detectable(self, cases: int) -> float | None:
        """The smallest true difference that this number of cases detects with WANTED_POWER; None if there is none."""
        if self.power(self.largest, cases) < WANTED_POWER:
            return None
        quantiles = student_quantile(cases - 1) + NormalDist().inv_cdf(WANTED_POWER)
        return quantiles * self.spread / math.sqrt(cases) + self.smallest / cases

    def cases_needed(self, difference: float) -> int | None:
        """The number of cases that detect this difference with WANTED_POWER; None for more than MOST_CASES."""
        found = bisect_left(range(MOST_CASES + 1), WANTED_POWER, FEWEST_CASES, key=partial(self.power, difference))
        return None if found > MOST_CASES else found


# -- one environment or several


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

    def values(self, *sides: Mapping[str, float]) -> list[list[float]]:
        """The values of its own cases that have one on each side: of cases with an equal prompt their mean, unless all
        have the same, as what they ask is in their rows then."""
        cases = [case for case in self.prompts if all(case in side for side in sides)]
        is_in_rows = len(set(self.prompts.values())) < 2
        groups = grouped((case if is_in_rows else self.prompts[case], case) for case in cases).values()
        return [[fmean(side[case] for case in group) for group in groups] for side in sides]


Mixture = tuple[ScoredEnv, ...]
"""The environments of a run: one without a name, or several."""


def named(mixture: Mixture) -> Mixture:
    """The environments, if there are several."""
    return tuple(one for one in mixture if one.name)


def bounds_of_mean(mixture: Mixture) -> Bounds | None:
    """The lowest and the highest weighted mean; None if an environment has no bounds."""
    if any(one.bounds is None for one in mixture):
        return None
    low, high = (sum(one.share * (one.bounds or UNIT)[end] for one in mixture) for end in (0, 1))
    return low, high


def combined(parts: Iterable[tuple[float, IntervalValues | None]]) -> IntervalValues | None:
    """The interval of a weighted mean, given shares and intervals; None without any."""
    found = [(share, interval) for share, interval in parts if interval is not None]
    if len(found) < 2:
        return found[0][1] if found else None
    total = sum(share for share, _ in found)
    mean = sum(share * one["mean"] for share, one in found) / total
    below = [share * (one["mean"] - one["low"]) / total for share, one in found if one["low"] is not None]
    above = [share * (one["high"] - one["mean"]) / total for share, one in found if one["high"] is not None]
    has_limits = len(below) == len(above) == len(found)
    return {
        "mean": mean,
        "low": mean - math.hypot(*below) if has_limits else None,
        "high": mean + math.hypot(*above) if has_limits else None,
        "count": sum(one["count"] or 0 for _, one in found),
    }


def of_means(means: Mapping[str, float], mixture: Mixture) -> IntervalValues | None:
    """The mean of the cases' values with its interval."""
    return combined((one.share, of_mean(one.values(means)[0], one.bounds)) for one in mixture)


def means_of(scoring: Scoring) -> dict[str, float]:
    """The mean score of each case that has a scored sample."""
    return {case: fmean(scores) for case, scores in scoring.items() if scores}


def interval_of_mean(scoring: Scoring, mixture: Mixture) -> IntervalValues | None:
    """The mean score with its interval; None if nothing was scored."""
    return of_means(means_of(scoring), mixture)


def mean_score(scoring: Scoring, mixture: Mixture) -> float | None:
    """The weighted mean of the environments' mean scores; None if nothing was scored."""
    found = interval_of_mean(scoring, mixture)
    return None if found is None else found["mean"]


def of_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> IntervalValues | None:
    """The mean change of the cases that have both values, with its interval and its p-value; None without a case."""
    pairs = ((one, one.values(before, after)) for one in mixture)
    change = combined((one.share, of_change(first, second, one.bounds)) for one, (first, second) in pairs)
    if change is not None:
        change["p_value"] = sign_flip_p_value(weighted_changes(before, after, mixture))
    return change


def weighted_changes(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> list[float]:
    """The changes of the cases that have both values, each times its weight: their mean is that of the mixture."""
    pairs = [(one.share, one.values(before, after)) for one in mixture]
    count, total = sum(len(first) for _, (first, _) in pairs), sum(share for share, (first, _) in pairs if first)
    return [
        (new - old) * share / total * count / len(first)
        for share, (first, second) in pairs
        for old, new in zip(first, second, strict=True)
    ]


# -- pass@K


def chances(scoring: Scoring, tries: int, mixture: Mixture) -> dict[str, float]:
    """Unbiased estimate of the probability that one of `tries` samples is solved, for each case with at least `tries`
    scored samples, of the environments whose scores have bounds."""
    found = {}
    for one in mixture:
        low, high = one.bounds or UNIT
        for case in one.prompts if one.bounds else ():
            scores = scoring.get(case, ())
            if len(scores) >= tries:
                failed = sum(score < high - NEARLY * (high - low) for score in scores)
                found[case] = 1 - math.comb(failed, tries) / math.comb(len(scores), tries)
    return found


# -- tables


def case_values(
    name: str, scorings: Sequence[Scoring], mixture: Mixture, tries: int
) -> Iterator[tuple[str, list[dict[str, float]], Mixture]]:
    """The rows of a table for scorings with one decoding, its name: the value of each case in each scoring, and the
    environments that they are of. With several tries also pass@K, with several environments also the rows of each."""
    rows = [(name, list(map(means_of, scorings)), mixture)]
    solvable = tuple(replace(one, bounds=UNIT) for one in mixture if one.bounds is not None)
    if tries > 1 and solvable:
        rows.append((f"pass@{tries}", [chances(scoring, tries, mixture) for scoring in scorings], solvable))
    for row, values, envs in rows:
        yield row, values, envs
        for one in named(envs):
            yield f"{row}, {one.name}", values, (one,)


def score_row(before: Mapping[str, float], after: Mapping[str, float], mixture: Mixture) -> ScoreRow:
    """The row of a value that cases have before and after."""
    change = of_changes(before, after, mixture)
    return {"before": of_means(before, mixture), "after": of_means(after, mixture), "change": change}


def score_table(scorings: Mapping[str, Scoring], mixture: Mixture, tries: int) -> ScoreTable:
    """The table of scorings named `before_sampled` and so on, whose cases have this number of samples."""
    table: ScoreTable = {}
    for decoding in DECODINGS:
        ends = [scorings.get(f"{phase}_{decoding}", {}) for phase in ("before", "after")]
        for row, (before, after), envs in case_values(decoding, ends, mixture, tries if decoding == "sampled" else 1):
            table[row] = score_row(before, after, envs)
    return table


def recorded_mixture(environment: JsonObject, options: JsonObject, cases: Mapping[str, tuple[str, str]]) -> Mixture:
    """The environments of a run folder, by its environment.json and its options, given the environment and the prompt
    of each held-out case."""
    several = as_object(environment.get("environments")) or {"": {"score_range": options.get("rl_score_range")}}
    return tuple(
        ScoredEnv(
            name,
            as_float(facts.get("share")) or 1.0,
            bounds_of(facts.get("score_range")),
            {case: prompt for case, (own, prompt) in cases.items() if own == name or not name},
        )
        for name, recorded in several.items()
        for facts in [as_object(recorded)]
    )
