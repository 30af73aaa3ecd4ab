"""How a noisy series of a run has changed: its first against its last quarter, with an error that allows for noise that
is correlated from step to step.

Metrics of neighbouring steps are alike: the policy changes slowly, and epochs repeat the same cases. Treated as
independent, such values look more certain than they are. The error here is that of means of first-order autoregressive
noise, whose variance and correlation are measured around a straight line in each quarter. Noise that is
correlated over most of a quarter looks like a trend there, and its error comes out too small: rules ask for a large
change as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

SHORTEST = 20
"""Minimum number of values; a quarter then has five."""
MOST_CORRELATED = 0.95
"""Maximum correlation of neighbouring values that the error allows for."""


@dataclass(frozen=True)
class Change:
    """Means of the first and of the last quarter of a series, and the standard error of each."""

    before: float
    after: float
    error: float

    @property
    def mean(self) -> float:
        """The change itself."""
        return self.after - self.before

    @property
    def low(self) -> float:
        """Lower limit of the change, two standard errors below it."""
        return self.mean - 2 * math.sqrt(2) * self.error

    @property
    def high(self) -> float:
        """Upper limit of the change, two standard errors above it."""
        return self.mean + 2 * math.sqrt(2) * self.error


def change_over(values: Sequence[float]) -> Change | None:
    """The change over a series, None if it is too short."""
    size = len(values) // 4
    if len(values) < SHORTEST:
        return None
    quarters = [values[start : start + size] for start in (0, size, len(values) - 2 * size, len(values) - size)]
    return Change(fmean(quarters[0]), fmean(quarters[3]), _error_of_mean([_residuals(part) for part in quarters]))


def _residuals(values: Sequence[float]) -> list[float]:
    """Distances from the line that fits best."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    slope = sum((place - middle) * value for place, value in enumerate(values)) / spread
    return [value - mean - slope * (place - middle) for place, value in enumerate(values)]


def _error_of_mean(parts: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean of one part."""
    size = len(parts[0])
    squares = sum(value * value for part in parts for value in part)
    if squares == 0.0:
        return 0.0
    products = sum(one * other for part in parts for one, other in pairwise(part))
    # the fitted line makes the correlation look smaller, by (2 + 4 rho) / size
    correlation = min(MOST_CORRELATED, max(0.0, (products / squares + 2 / size) / max(0.2, 1 - 4 / size)))
    variance = squares / (len(parts) * (size - 2))
    return math.sqrt(variance * (1 + correlation) / (1 - correlation) / size)
