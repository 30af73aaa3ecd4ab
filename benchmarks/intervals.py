"""Whether 95% intervals cover the truth 95 times in 100, and how wide they are beside the usual ones:
`python -m benchmarks.intervals [--draws N]`.

Each cell draws cases from a population with a known mean, again and again, and asks `aitrain.runs.intervals`. Exits 1
where the coverage is not 0.93 to 0.97, or the mean width is more than a tenth above the usual method's. With 32 cases
or fewer near a bound of the scores, and with 64 or fewer where a few scores lie far from all others, intervals may
cover more often, and never less. The usual method's width counts only where that method itself covers 0.93.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from aitrain.runs.intervals import Interval, of_change, of_mean, student_quantile

COUNTS = (8, 16, 32, 64, 200)
COVERAGE = (0.93, 0.97)
WIDTH = 1.10
NEAR_A_BOUND, RARE = 32, 64
"""Numbers of cases up to which intervals may cover more often."""
Z = NormalDist().inv_cdf(0.975)

Limits = tuple[float, float]
Scores = list[float]


@dataclass(frozen=True)
class Population:
    """`draw(rng, count)`: the mean scores of so many cases, before and after for a change, and the population's mean
    (change). `usual(scores)`: the limits of the method that is usual for such scores. `loose`: with so many
    cases or fewer, intervals may cover more often."""

    name: str
    draw: Callable[[random.Random, int], tuple[list[Scores], float]]
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


def tango(scores: list[Scores]) -> Limits:
    """Tango's (1998) score interval of a paired difference of shares."""
    changes = [round(new - old) for old, new in zip(*scores, strict=True)]
    return _tango(changes.count(1), changes.count(-1), len(changes))


_KNOWN: dict[tuple[int, int, int], Limits] = {}


def _tango(better: int, worse: int, count: int) -> Limits:
    key = better, worse, count
    if key not in _KNOWN:
        middle = (better - worse) / count
        low = _halved(-1.0, middle, lambda change: _statistic(*key, change) > Z)
        high = _halved(middle, 1.0, lambda change: _statistic(*key, change) > -Z)
        _KNOWN[key] = low, high
    return _KNOWN[key]


def _statistic(better: int, worse: int, count: int, change: float) -> float:
    linear = -better - worse + (2 * count - better + worse) * change
    root = math.sqrt(max(0.0, linear**2 + 8 * count * worse * change * (1 - change)))
    share = (root - linear) / (4 * count)
    spread = count * (2 * share + change * (1 - change))
    distance = better - worse - count * change
    return distance / math.sqrt(spread) if spread > 1e-12 else math.copysign(math.inf, distance) if distance else 0.0


def _halved(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


# -- populations


def shares(low: float, high: float) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
    """Scores of 0 or 1, one sample a case; each draw has a chance of its own."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        chance = rng.uniform(low, high)
        return [[float(rng.random() < chance) for _ in range(count)]], chance

    return draw


def betas(one: float, other: float) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
    """Continuous scores, one sample a case."""
    return lambda rng, count: ([[rng.betavariate(one, other) for _ in range(count)]], one / (one + other))


def partial_credit(rng: random.Random, count: int) -> tuple[list[Scores], float]:
    """Half of the cases at 0, the others with any score."""
    return [[rng.random() if rng.random() < 0.5 else 0.0 for _ in range(count)]], 0.25


def mostly_none(rng: random.Random, count: int) -> tuple[list[Scores], float]:
    """Nine tenths of the cases at 0, the others with any score."""
    return [[rng.random() if rng.random() < 0.1 else 0.0 for _ in range(count)]], 0.05


def rare(usual: tuple[float, ...], other: float) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
    """One of the usual scores evenly, as for the form of an answer, and another one for 5 cases in 100."""

    def draw(rng: random.Random, count: int) -> tuple[list[Scores], float]:
        return [[other if rng.random() < 0.05 else rng.choice(usual) for _ in range(count)]], mean

    mean = 0.95 * fmean(usual) + 0.05 * other
    return draw


def samples(one: float, other: float, each: int) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
    """Scores of 0 or 1, several samples of each case, whose chances differ."""

    def case(rng: random.Random) -> float:
        chance = rng.betavariate(one, other)
        return sum(rng.random() < chance for _ in range(each)) / each

    return lambda rng, count: ([[case(rng) for _ in range(count)]], one / (one + other))


def noisy(each: int) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
    """Continuous scores, several samples of each case, which are alike."""

    def case(rng: random.Random) -> float:
        own = rng.betavariate(2, 2)
        return fmean(rng.betavariate(8 * own + 0.01, 8 * (1 - own) + 0.01) for _ in range(each))

    return lambda rng, count: ([[case(rng) for _ in range(count)]], 0.5)


def pairs(low: float, high: float, each: int = 1) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
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


def rarely_right(*usual: float) -> Callable[[random.Random, int], tuple[list[Scores], float]]:
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
    Population("continuous, half of them 0", partial_credit, student),
    Population("continuous, mostly near 0", betas(0.1, 0.4), student, loose=NEAR_A_BOUND),
    Population("continuous, nine tenths of them 0", mostly_none, student, loose=NEAR_A_BOUND),
    Population("0.1 or 0.2, rarely 1", rare((0.1, 0.2), 1.0), student, loose=RARE),
    Population("0 or 0.2, rarely 1", rare((0.0, 0.2), 1.0), student, loose=RARE),
    Population("0.5 or 0.6, rarely 0", rare((0.5, 0.6), 0.0), student, loose=RARE),
    Population("0.3 or 0.31, rarely 1", rare((0.3, 0.31), 1.0), student, loose=RARE),
    Population("4 samples of 0/1, alike", samples(0.5, 0.5, 4), student),
    Population("8 samples of 0/1", samples(2, 2, 8), student),
    Population("8 samples of 0/1, near a bound", samples(9, 0.3, 8), student, loose=NEAR_A_BOUND),
    Population("4 continuous samples", noisy(4), student),
    Population("change, 0/1", pairs(0.2, 0.8), tango),
    Population("change, 0/1, near a bound", pairs(0.01, 0.1), tango, loose=NEAR_A_BOUND),
    Population("change, 4 samples of 0/1", pairs(0.2, 0.8, 4), student),
    Population("change, 4 samples of 0/1, near a bound", pairs(0.9, 0.99, 4), student, loose=NEAR_A_BOUND),
    Population("change, continuous", shifts, student),
    Population("change, 0.1 or 0.2, rarely 1", rarely_right(0.1, 0.2), student, loose=RARE),
    Population("change, 0.3 or 0.31, rarely 1", rarely_right(0.3, 0.31), student, loose=RARE),
]


# -- cells


@dataclass(frozen=True)
class Cell:
    """What came out for one population and one number of cases."""

    coverage: float
    width: float
    usual_coverage: float
    usual_width: float

    def problem(self, is_loose: bool) -> str:
        """What is out of bounds, empty for nothing."""
        low, high = COVERAGE
        if self.coverage < low or (self.coverage > high and not is_loose):
            return f"coverage {self.coverage:.3f}"
        if self.usual_coverage >= low and self.width > WIDTH * self.usual_width and not is_loose:
            return f"width {self.width / self.usual_width:.2f} of the usual one"
        return ""


def interval(scores: list[Scores]) -> Interval:
    """What the report shows for these cases."""
    named = [{str(case): score for case, score in enumerate(one)} for one in scores]
    found = of_mean(scores[0]) if len(scores) == 1 else of_change(*named)
    assert found is not None
    return found


def simulate(population: Population, count: int, draws: int) -> Cell:
    """Draw so many times; the limits themselves count as covered."""
    rng = random.Random(f"{population.name}/{count}")
    covered, widths = [0, 0], [0.0, 0.0]
    for _ in range(draws):
        scores, truth = population.draw(rng, count)
        found = interval(scores)
        assert found.low is not None
        assert found.high is not None
        for place, (low, high) in enumerate(((found.low, found.high), population.usual(scores))):
            covered[place] += low - 1e-9 <= truth <= high + 1e-9
            widths[place] += high - low
    return Cell(covered[0] / draws, widths[0] / draws, covered[1] / draws, widths[1] / draws)


def main() -> int:
    """All cells, as a table."""
    parser = argparse.ArgumentParser(description="Coverage and width of the report's intervals.")
    parser.add_argument("--draws", type=int, default=4000, help="of each cell (default: 4000)")
    wanted = parser.parse_args()
    head = " | ".join(f"{count} cases" for count in COUNTS)
    print(f"| coverage, width / usual (coverage of the usual) | {head} |")
    print("|---" * (1 + len(COUNTS)) + "|")
    problems = []
    for population in POPULATIONS:
        cells = {count: simulate(population, count, wanted.draws) for count in COUNTS}
        print(f"| {population.name} | {' | '.join(map(shown, cells.values()))} |", flush=True)
        for count, cell in cells.items():
            if problem := cell.problem(count <= population.loose):
                problems.append(f"{population.name}, {count} cases: {problem}")
    print("\n".join(problems))
    return 1 if problems else 0


def shown(cell: Cell) -> str:
    """A cell of the table."""
    return f"{cell.coverage:.3f}, {cell.width / cell.usual_width:.2f} ({cell.usual_coverage:.3f})"


if __name__ == "__main__":
    sys.exit(main())
