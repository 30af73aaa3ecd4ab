"""How sure a difference between two models is: the p-value of a paired test, its correction for several comparisons,
and the number of cases that a test needs.

The case is the unit, as in `runs/intervals.py`: a case's difference is that of the means of its samples.

The test is a sign-flip test: if both models were equally good at every case, each difference could as well have the
other sign. The p-value is the share of all choices of signs whose mean is at least as far from 0 as the measured one.
With scores of 0 and 1 and one sample a case, that is McNemar's exact test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from statistics import NormalDist, stdev

from aitrain.runs.intervals import EQUAL, Bounds, student_quantile

FEW_DIFFERENCES = 16
"""Up to this many differences other than 0, all choices of signs are tried; beyond, DRAWS of them, unless the
differences have one size."""
DRAWS = 19_999
BLOCK = 8
"""Differences whose sums with all choices of signs are computed once, and then looked up by a random byte."""
ALPHA = 0.05
"""A p-value up to this is a detected difference."""
FEWEST_CASES = 6
"""With fewer, no p-value is as small as ALPHA."""
SAME_STEP = 1e-6
PRECISION = 1e-6
WANTED_POWER = 0.8
MOST_CASES = 1_000_000


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean of the cases' differences; the same one every time it is computed."""
    changed = [difference for difference in differences if difference]
    if not changed:
        return 1.0
    total = math.fsum(map(abs, changed))
    if max(map(abs, changed)) - min(map(abs, changed)) < EQUAL * total:
        return _mcnemar(sum(change > 0 for change in changed), len(changed))
    measured = abs(math.fsum(changed)) - EQUAL * total
    if len(changed) <= FEW_DIFFERENCES:
        sums = _sums_of_all_signs(changed)
        return sum(abs(one) >= measured for one in sums) / len(sums)
    extreme = sum(abs(one) >= measured for one in _sums_of_random_signs(changed))
    return (1 + extreme) / (1 + DRAWS)


def _mcnemar(better: int, count: int) -> float:
    """The p-value of `count` differences of one size, of which so many are above 0: the sums are those of a coin."""
    tail = sum(math.comb(count, heads) for heads in range(min(better, count - better) + 1))
    return min(1.0, 2 * tail / (1 << count))


def _sums_of_all_signs(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [total + value for total in sums] + [total - value for total in sums]
    return sums


def _sums_of_random_signs(values: Sequence[float]) -> Iterator[float]:
    tables = [_sums_of_all_signs(values[start : start + BLOCK]) for start in range(0, len(values), BLOCK)]
    tables = [table * (2**BLOCK // len(table)) for table in tables]
    rng = random.Random(0)
    for _ in range(DRAWS):
        yield sum(map(getitem, tables, rng.randbytes(len(tables))))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm's method, in the given order."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = highest
    return corrected


@dataclass(frozen=True)
class Power:
    """The probability of detecting a difference between two models, by the noncentral t distribution.

    It is as good as the spread of the cases' differences, which is estimated from a first comparison, and changes with
    the number of samples a case.
    """

    spread: float
    """Standard deviation of the cases' differences."""
    step: float = 0.0
    """The smallest difference other than 0 if the others are multiples of it, as with a few samples of 0 or 1: the test
    then counts a tie as no difference, which costs half a tie on each side."""
    changing: float = 1.0
    """Share of cases with a difference other than 0: the test needs FEWEST_CASES of them."""
    largest: float = math.inf
    """The largest difference that a case can have."""

    @classmethod
    def of(cls, differences: Sequence[float], bounds: Bounds | None = None) -> Power | None:
        """The power of comparisons whose cases differ as these do, of scores between the bounds; None if they all
        differ by the same."""
        sizes = [abs(difference) for difference in differences if difference]
        spread = stdev(differences) if len(differences) > 1 else 0.0
        if not sizes or spread <= EQUAL * max(sizes):
            return None
        multiples = [size / min(sizes) for size in sizes]
        has_steps = all(abs(multiple - round(multiple)) < SAME_STEP for multiple in multiples)
        largest = max(bounds[1] - bounds[0], *sizes) if bounds else math.inf
        return cls(spread, min(sizes) if has_steps else 0.0, len(sizes) / len(differences), largest)

    def power(self, difference: float, cases: int) -> float:
        """Probability that so many cases detect a difference, if this is the true one."""
        if cases < FEWEST_CASES:
            return 0.0
        distance = min(abs(difference), self.largest)
        enough = _at_least(FEWEST_CASES, cases, max(self.changing, distance / self.largest))
        # no values up to the largest one with this mean vary more
        spread = self.spread if math.isinf(self.largest) else min(self.spread, math.sqrt(self.largest**2 - distance**2))
        if not spread:
            return enough
        root = math.sqrt(cases) / spread
        middle, width = _normal_terms(student_quantile(cases - 1), cases)
        up, down = ((sign * distance - self.step / cases) * root for sign in (1, -1))
        return min(enough, NormalDist().cdf((up - middle) / width) + NormalDist().cdf((down - middle) / width))

    def detectable(self, cases: int, power: float = WANTED_POWER) -> float | None:
        """The smallest difference that so many cases detect with this probability; None if they detect none."""
        low, high = 0.0, min(self.largest, 100 * self.spread)
        if self.power(high, cases) < power:
            return None
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.power(middle, cases) < power else (low, middle)
        return high

    def cases_needed(self, difference: float, power: float = WANTED_POWER) -> int | None:
        """The number of cases that detect this difference with this probability; None for more than MOST_CASES."""
        low, high = FEWEST_CASES - 1, FEWEST_CASES
        while self.power(difference, high) < power:
            low, high = high, 2 * high
            if low > MOST_CASES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.power(difference, middle) < power else (low, middle)
        return high


def _at_least(wanted: int, count: int, share: float) -> float:
    """Probability that at least so many of `count` cases are among this share of all cases."""
    return 1 - math.fsum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(wanted))


def _normal_terms(quantile: float, cases: int) -> tuple[float, float]:
    """Mean and width of the normal variable that approximates a noncentral t at this quantile (Johnson and Welch)."""
    freedom = cases - 1
    return quantile * (1 - 1 / (4 * freedom)), math.sqrt(1 + quantile**2 / (2 * freedom))
