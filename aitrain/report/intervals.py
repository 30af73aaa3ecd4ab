"""How sure a mean score is: 95% intervals.

A mean of scores between 0 and 1 gets Wilson's interval, which is right for right-or-wrong scores, wider than needed for
scores in between, and no point where all scores are equal. A change on the same cases gets the interval of Bonett and
Price (2012): that of the cases' own differences, with two more, one case that became right and one that became wrong.
Cases are what differs between two samples, so both treat them as drawn from many; they do not know how much another
training run would differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev

Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval, over so many cases."""

    mean: float
    low: float
    high: float
    count: int


def of_mean(scores: Collection[float]) -> Interval | None:
    """The mean of scores from 0 to 1; None of none."""
    if not scores:
        return None
    count, mean = len(scores), fmean(scores)
    share = min(1.0, max(0.0, mean))
    weight = Z * Z / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return Interval(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), count)


def of_change(before: Mapping[str, float], after: Mapping[str, float]) -> Interval | None:
    """The mean change of the cases that have a score before and after; None when there is none."""
    changes = [after[case] - score for case, score in before.items() if case in after]
    if not changes:
        return None
    mean, adjusted = fmean(changes), [*changes, 1.0, -1.0]
    half = Z * pstdev(adjusted) / math.sqrt(len(adjusted))
    middle = fmean(adjusted)
    return Interval(mean, max(-1.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), len(changes))
