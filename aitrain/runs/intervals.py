"""95% confidence intervals of mean scores, over cases.

The case is the unit: cases are drawn from the many that could have been asked, and all samples of one case count as one
value, their mean. So the intervals hold for one sample per case and for several, however much those are alike.

A mean of scores between two bounds, mapped to 0 and 1, gets a score interval: all means m with
(mean - m)^2 <= a m (1 - m). With a = z^2 / n that is Wilson's interval, which is right where every case is at a bound;
there, the limits next to the bounds are moved out (Brown, Cai and DasGupta 2001), because Wilson's cover too seldom
there. Other case means vary less than that, so a = t^2 d / n, with Student's t and d the share that their variance is
of m (1 - m): the design effect of a survey. For symmetric scores that is about the t interval; near a bound it leans
away from it, as the data do. It is widened to where Student's interval reaches when it is shifted by the skewness of
the scores (Hall 1992), which a few scores carry that lie far from the rest. It is never wider than Wilson's.

Scores that are all alike, such as those for the form of an answer while none is right, do not show how often others
lie far away, and no interval made of them knows it (Bahadur and Savage 1956). Theirs reaches at least as far towards
each bound, relative to the distance, as Wilson's of values that are all at the other one: as far as cases at that
bound can be so rare that none was drawn. Equal scores have just that interval, so it is never a point.

A change between two scorings of the same cases, with every case at a bound, gets Newcombe's (1998) square-and-add
interval, made of the two intervals above and the correlation of the cases. Other changes get the interval of the
cases' own differences, which are from -1 to 1: shifted by their skewness however few they are, as a change is often
large for a few cases and small for the rest, and with the limits of alike scores if those of the cases that have
changed were alike before and are alike after.

Scores without bounds get Student's t interval, widened by the shifted one. There is none of one case, nor of equal
ones.

The intervals show the variation over cases, not the variation over training runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance
from typing import TypeAlias

Bounds: TypeAlias = tuple[float, float]
"""The lowest and the highest possible score."""
UNIT: Bounds = (0.0, 1.0)

Limits: TypeAlias = tuple[float, float]

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
POISSON_LIMITS = (0.0512933, 0.3553615, 0.8176914)
"""The mean of a Poisson variable that is at least 1, 2, 3 with a chance of 1 - LEVEL."""
MANY_CASES = 50
"""With more cases than this, three limits next to a bound are moved out; with fewer, two."""
FEW_CASES = 16
"""With more cases than this, the skewness of their scores is known well enough to shift an interval by it."""
ALIKE = 0.2
"""Scores are alike if no two differ by more than this share of the range, or if they have two values; differences of
scores, if no two differ by more than half of it."""
PLACES, EQUAL = 12, 1e-12
"""Differences and variances below this, of values between 0 and 1, are rounding, as are further decimal places."""


@dataclass(frozen=True)
class Interval:
    """A mean over `count` cases with the limits of its 95% interval, None where there is none."""

    mean: float
    low: float | None
    high: float | None
    count: int


def of_mean(scores: Collection[float], bounds: Bounds | None = UNIT) -> Interval | None:
    """The mean of the scores of cases, one value a case: the mean of its samples. None without a case."""
    if not scores:
        return None
    mean = fmean(scores)
    if bounds is None:
        low, high = _student(list(scores))
        return Interval(mean, low, high, len(scores))
    below, above = _limits(_between_0_and_1(scores, bounds))
    size = bounds[1] - bounds[0]
    return Interval(mean, min(mean, bounds[0] + below * size), max(mean, bounds[0] + above * size), len(scores))


def of_change(before: Mapping[str, float], after: Mapping[str, float], bounds: Bounds | None = UNIT) -> Interval | None:
    """The mean change of the cases that have a score before and after; None when there is none."""
    cases = [case for case in before if case in after]
    if not cases:
        return None
    differences = [after[case] - before[case] for case in cases]
    mean = fmean(differences)
    if bounds is None:
        low, high = _student(differences)
        return Interval(mean, low, high, len(cases))
    first = _between_0_and_1([before[case] for case in cases], bounds)
    second = _between_0_and_1([after[case] for case in cases], bounds)
    below, above = _change_limits(first, second)
    size = bounds[1] - bounds[0]
    return Interval(mean, min(mean, below * size), max(mean, above * size), len(cases))


def _between_0_and_1(scores: Collection[float], bounds: Bounds) -> list[float]:
    """The scores as shares of the range, without what rounding has added."""
    low, high = bounds
    return [round(min(1.0, max(0.0, (score - low) / (high - low))), PLACES) for score in scores]


# -- a mean


def _limits(values: Sequence[float]) -> Limits:
    """Limits of the mean of values from 0 to 1."""
    if set(values) <= {0.0, 1.0}:
        return _of_share(len(values), round(sum(values)))
    are_alike = _extent(values) <= ALIKE or len(set(values)) <= 2
    return _of_spread(values, len(values) > FEW_CASES, are_alike)


def _of_spread(values: Sequence[float], is_shifted: bool, are_alike: bool) -> Limits:
    """The score interval by the variance of the values, widened by what else applies, and not beyond Wilson's."""
    count, mean = len(values), fmean(values)
    spread = variance(values) if count > 1 else 0.0
    limits = [_score_limits(student_quantile(count - 1) ** 2 * spread / (mean * (1 - mean)) / count, mean)]
    if is_shifted and (shifted := _shifted(values)):
        limits.append(shifted)
    if are_alike:
        share = Z * Z / (count + Z * Z)
        limits.append((mean * (1 - share), mean + (1 - mean) * share))
    lowest, highest = _score_limits(Z * Z / count, mean)
    return max(lowest, min(low for low, _ in limits)), min(highest, max(high for _, high in limits))


def _extent(values: Sequence[float]) -> float:
    """The largest distance of two values, without what rounding adds."""
    return max(values) - min(values) - EQUAL


def _score_limits(a: float, mean: float) -> Limits:
    """All m with (mean - m)^2 <= a m (1 - m)."""
    middle = (mean + a / 2) / (1 + a)
    half = math.sqrt(a * mean * (1 - mean) + a * a / 4) / (1 + a)
    return max(0.0, middle - half), min(1.0, middle + half)


def _of_share(count: int, ones: int) -> Limits:
    """Wilson's interval, moved out where few values are at one of the bounds."""
    low, high = _score_limits(Z * Z / count, ones / count)
    limits = POISSON_LIMITS[: 3 if count > MANY_CASES else 2]
    if 1 <= ones <= len(limits):
        low = min(low, limits[ones - 1] / count)
    if 1 <= count - ones <= len(limits):
        high = max(high, 1 - limits[count - ones - 1] / count)
    return low, high


# -- a change


def _change_limits(before: Sequence[float], after: Sequence[float]) -> Limits:
    if {*before, *after} <= {0.0, 1.0}:
        return _square_and_add(before, after)
    differences = [new - old for old, new in zip(before, after, strict=True)]
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    are_alike = _extent(differences) <= ALIKE / 2 or all(
        _extent(scores) <= ALIKE for scores in zip(*changed, strict=True)
    )
    low, high = _of_spread([(1 + difference) / 2 for difference in differences], True, are_alike)
    return 2 * low - 1, 2 * high - 1


def _square_and_add(before: Sequence[float], after: Sequence[float]) -> Limits:
    old, new = fmean(before), fmean(after)
    (old_low, old_high), (new_low, new_high) = _limits(before), _limits(after)
    correlation = _correlation(before, after)
    down, up = (new - new_low, old_high - old), (old - old_low, new_high - new)
    return new - old - _hypotenuse(*down, correlation), new - old + _hypotenuse(*up, correlation)


def _hypotenuse(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))


def _correlation(before: Sequence[float], after: Sequence[float]) -> float:
    """Correlation over the cases; for values at the bounds with Newcombe's correction: a positive covariance is reduced
    by half a case."""
    count, old, new = len(before), fmean(before), fmean(after)
    together = sum((x - old) * (y - new) for x, y in zip(before, after, strict=True))
    if {*before, *after} <= {0.0, 1.0} and together > 0:
        together = max(0.0, together - 0.5)
    spreads = sum((x - old) ** 2 for x in before) * sum((y - new) ** 2 for y in after)
    return together / math.sqrt(spreads) if spreads > (EQUAL * count) ** 2 else 0.0


# -- Student's t


def _student(values: Sequence[float]) -> Limits | tuple[None, None]:
    """Limits of the mean of unbounded values; (None, None) if they are equal or there is only one."""
    shifted = _shifted(values)
    if shifted is None:
        return None, None
    mean, half = fmean(values), (shifted[1] - shifted[0]) / 2
    return min(mean - half, shifted[0]), max(mean + half, shifted[1])


def _shifted(values: Sequence[float]) -> Limits | None:
    """Student's interval of the mean, shifted by the skewness of the values; None if they are equal."""
    count, mean = len(values), fmean(values)
    spread = variance(values) if count > 1 else 0.0
    if spread <= EQUAL * max(mean * mean, 1e-6):
        return None
    quantile = student_quantile(count - 1)
    skewness = fmean((value - mean) ** 3 for value in values) / spread**1.5
    shift = skewness * math.sqrt(spread) * (2 * quantile**2 + 1) / (6 * count)
    half = quantile * math.sqrt(spread / count)
    return mean + shift - half, mean + shift + half


@cache
def student_quantile(freedom: int) -> float:
    """Two-sided quantile of Student's t at LEVEL, for `freedom` degrees of freedom; by bisection."""
    low, high = Z, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < LEVEL else (low, middle)
    return high


def _student_within(t: float, freedom: int) -> float:
    """Probability that a variable of Student's t is between -t and t, as a finite sum over powers of a cosine."""
    if freedom > 1_000:
        return 1 - 2 * NormalDist().cdf(-t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
