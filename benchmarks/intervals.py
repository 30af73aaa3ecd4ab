"""Whether 95% intervals cover the truth 95 times in 100, and how wide they are beside the usual ones.

Each cell draws cases from a population with a known mean, again and again, and asks `aitrain.runs.statistics`. With 32
cases or fewer near a bound of the scores, and with 64 or fewer where a few scores lie far from all others, intervals
may cover more often, and never less. The usual method is Wilson's for a share, and else Student's of the cases' means
or differences; its width counts only where that method itself covers 0.93.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from aitrain.runs.statistics import of_change, of_mean, student_quantile
from benchmarks.measuring import Asked, Figure

COUNTS = (8, 16, 32, 64, 200)
COVERAGE = (0.93, 0.97)
WIDTH = 1.10
DRAWS = 4000
"""Of each cell."""
NEAR_A_BOUND, RARE = 32, 64
"""Numbers of cases up to which intervals may cover more often."""
Z = NormalDist().inv_cdf(0.975)

Limits = tuple[float, float]
Scores = list[float]
Draw = Callable[[random.Random, int], tuple[list[Scores], float]]
"""Mean scores of a sample of cases, before and after for a change, and the population's mean (change)."""


@dataclass(frozen=True)
class Population:
    """Cases to draw. `usual(scores)`: the limits of the method that is usual for such scores. `loose`: the number of
    cases up to which intervals may cover more often."""

    name: str
    draw: Draw
    usual: Callable[[list[Scores]], Limits]
    loose: int = 0


# -- the usual methods


def wilson(scores: list[Scores]) -> Limits:
    """Of a share."""
    count, mean = len(scores[0]), fmean(scores[0])
    weight = Z * Z / count
    middle = (mean + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(mean * (1 - mean) / count + weight / (4 * count))
    return middle - half, middle + half


def student(scores: list[Scores]) -> Limits:
    """Of the cases' means, or of their differences: for clusters of equal size, the cluster-robust interval."""
    values = scores[0] if len(scores) == 1 else [new - old for old, new in zip(*scores, strict=True)]
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


# -- populations


def shares(low: float, high: float) -> Draw:
    """Scores of 0 or 1, one sample a case; each draw has a chance of its own."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        chance = rng.uniform(low, high)
        return [[float(rng.random() < chance) for _ in range(count)]], chance

    return draw


def betas(one: float, other: float) -> Draw:
    """Continuous scores, one sample a case."""
    return lambda rng, count: ([[rng.betavariate(one, other) for _ in range(count)]], one / (one + other))


def partly(share: float) -> Draw:
    """So many of the cases with any score, the others at 0."""
    return lambda rng, count: ([[rng.random() if rng.random() < share else 0.0 for _ in range(count)]], share / 2)


def rare(usual: tuple[float, ...], other: float) -> Draw:
    """One of the usual scores evenly, as for the form of an answer, and another one for 5 cases in 100."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        return [[other if rng.random() < 0.05 else rng.choice(usual) for _ in range(count)]], mean

    mean = 0.95 * fmean(usual) + 0.05 * other
    return draw


def samples(one: float, other: float, each: int) -> Draw:
    """Scores of 0 or 1, several samples of each case, whose chances differ."""

    def case(rng: random.Random) -> float:
        chance = rng.betavariate(one, other)
        return sum(rng.random() < chance for _ in range(each)) / each

    return lambda rng, count: ([[case(rng) for _ in range(count)]], one / (one + other))


def pairs(low: float, high: float, each: int = 1) -> Draw:
    """Scores of 0 or 1 before and after, `each` samples a case; a case that is harder before is harder after. A case's
    chance is that of the draw, squared or its root, evenly."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        chances = sorted(rng.uniform(low, high) for _ in range(2))
        both: list[Scores] = [[], []]
        for _ in range(count):
            power = rng.choice((0.5, 2.0))
            for scores, chance in zip(both, chances, strict=True):
                scores.append(sum(rng.random() < chance**power for _ in range(each)) / each)
        means = [(chance**0.5 + chance**2) / 2 for chance in chances]
        return both, means[1] - means[0]

    return draw


def shifts(rng: random.Random, count: int) -> tuple[list[Scores], float]:
    """Continuous scores that come nearer to 1 by a share of the way, which differs."""
    before = [rng.betavariate(2, 3) for _ in range(count)]
    return [before, [score + (1 - score) * rng.betavariate(1, 3) for score in before]], 0.6 * 0.25


def rarely_right(*usual: float) -> Draw:
    """One of the usual scores, and 1 for 5 cases in 100 before and 10 after; seven in ten of the first stay right."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        both: list[Scores] = [[], []]
        for _ in range(count):
            old = rng.random()
            new = old if rng.random() < 0.7 else rng.random()
            for scores, place, share in zip(both, (old, new), (0.05, 0.1), strict=True):
                scores.append(1.0 if place < share else rng.choice(usual))
        return both, 0.05 * (1 - fmean(usual))

    return draw


POPULATIONS = [
    Population("0/1", shares(0.1, 0.9), wilson),
    Population("0/1, near a bound", shares(0.005, 0.05), wilson, loose=NEAR_A_BOUND),
    Population("continuous, symmetric", betas(2, 2), student),
    Population("continuous, skewed", betas(2, 6), student),
    Population("continuous, mostly at the ends", betas(0.5, 0.5), student),
    Population("continuous, half of them 0", partly(0.5), student),
    Population("continuous, mostly near 0", betas(0.1, 0.4), student, loose=NEAR_A_BOUND),
    Population("continuous, nine tenths of them 0", partly(0.1), student, loose=NEAR_A_BOUND),
    Population("0.1 or 0.2, rarely 1", rare((0.1, 0.2), 1.0), student, loose=RARE),
    Population("4 samples of 0/1, alike", samples(0.5, 0.5, 4), student),
    Population("8 samples of 0/1", samples(2, 2, 8), student),
    Population("8 samples of 0/1, near a bound", samples(9, 0.3, 8), student, loose=NEAR_A_BOUND),
    Population("change, 0/1", pairs(0.2, 0.8), student),
    Population("change, 0/1, near a bound", pairs(0.01, 0.1), student, loose=NEAR_A_BOUND),
    Population("change, 4 samples of 0/1", pairs(0.2, 0.8, 4), student),
    Population("change, 4 samples of 0/1, near a bound", pairs(0.9, 0.99, 4), student, loose=NEAR_A_BOUND),
    Population("change, continuous", shifts, student),
    Population("change, 0.1 or 0.2, rarely 1", rarely_right(0.1, 0.2), student, loose=RARE),
]


# -- cells


@dataclass(frozen=True)
class Cell:
    """What came out for one population and one number of cases."""

    coverage: float
    width: float
    usual_coverage: float
    usual_width: float


def simulate(population: Population, count: int, draws: int) -> Cell:
    """Share of draws whose interval holds the mean; the limits themselves count as covered."""
    rng = random.Random(f"{population.name}/{count}")
    covered, widths = [0, 0], [0.0, 0.0]
    for _ in range(draws):
        scores, truth = population.draw(rng, count)
        found = of_mean(scores[0]) if len(scores) == 1 else of_change(*scores)
        assert found is not None
        assert found["low"] is not None
        assert found["high"] is not None
        for place, (low, high) in enumerate(((found["low"], found["high"]), population.usual(scores))):
            covered[place] += low - 1e-9 <= truth <= high + 1e-9
            widths[place] += high - low
    return Cell(covered[0] / draws, widths[0] / draws, covered[1] / draws, widths[1] / draws)


def measure(asked: Asked) -> Iterator[Figure]:
    """For each population all numbers of cases."""
    low, high = COVERAGE
    for population in POPULATIONS:
        cells = {count: simulate(population, count, 100 if asked.is_short else DRAWS) for count in COUNTS}
        strict = [cell for count, cell in cells.items() if count > population.loose]
        loose = [cell.coverage for count, cell in cells.items() if count <= population.loose]
        widths = [cell.width / cell.usual_width for cell in strict if cell.usual_coverage >= low]
        coverage = f"{population.name}: coverage"
        yield Figure(coverage, [cell.coverage for cell in strict], high, low, is_each=True)
        if loose:
            yield Figure(f"{coverage}, up to {population.loose} cases", loose, least=low, is_each=True)
        if widths:
            yield Figure(f"{population.name}: width by the usual one", widths, WIDTH, is_each=True)
