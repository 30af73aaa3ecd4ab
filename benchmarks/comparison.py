"""Whether `aitrain compare` finds no difference where there is none, and its power is the share of comparisons that
detect a difference: `python -m benchmarks.comparison [--draws N]`.

The tiny model is evaluated once, with 200 samples of each case. Each of 100 comparisons takes two of them, which were
sampled with different seeds, through the whole of `aitrain compare`. Then come comparisons of drawn scores, whose
true difference is known. Exits 1 if fewer than 95 in 100 of all drawn comparisons of a model with itself find no
difference, or 93 in 100 of one kind, which few draws may do by chance; or if a predicted power is off by more than 10
points.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from aitrain.runs.comparison import compare_all
from aitrain.runs.intervals import UNIT
from aitrain.runs.mixture import ScoredEnv, of_changes
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.runs.significance import Power
from aitrain.runs.verdict import verdict_of

SEEDS = 100
UNDETECTED = 0.95
UNDETECTED_OF_FEW = 0.93
"""Of one kind of comparisons, of which there are a hundred or a few more."""
POINTS = 0.10
COUNTS = (16, 64, 200)
PILOTS = 40
"""Comparisons from which a power is predicted; the mean of their predictions counts."""
PILOT_CASES = 64

Scores = dict[str, float]


# -- the tiny model


def evaluated(folder: Path) -> list[RolloutRecord]:
    """The episodes of an eval of the tiny model, with two samples of each case for each seed."""
    flags = ["--rl-env=envs.arithmetic", "--rl-max-new-tokens=8", "--cases=64", f"--samples={2 * SEEDS}"]
    command = [sys.executable, "-m", "aitrain", "eval", "tiny", *flags, "--decoding=sampled", "--quiet"]
    subprocess.run([*command, f"--output-dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    return [record for file in sorted(folder.glob("*/rollouts/*.jsonl")) for record in read_rollouts(file)]


def verdicts_of_one_model(folder: Path) -> Iterator[str]:
    """The verdict of each seed's comparison."""
    records = evaluated(folder / "runs")
    for seed in range(SEEDS):
        sides = [folder / "pairs" / f"{seed}{side}" for side in "ab"]
        for place, side in enumerate(sides):
            (side / "rollouts").mkdir(parents=True)
            chosen = [record.to_json() for record in records if record.sample == 2 * seed + place]
            (side / "rollouts" / "rank0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chosen))
        (comparison,) = compare_all(read_scorings(sides))
        yield comparison.verdict


# -- drawn scores


@dataclass(frozen=True)
class Population:
    """Cases whose chances are Beta(a, b) distributed for model A; B is better by a share of what A lacks."""

    name: str
    a: float
    b: float
    samples: int
    gain: float = 0.0

    def draw(self, rng: random.Random, count: int) -> tuple[Scores, Scores]:
        """The scores of both models on so many cases: means of samples of 0 or 1."""
        first, second = Scores(), Scores()
        for case in range(count):
            chance = rng.betavariate(self.a, self.b)
            for scores, right in ((first, chance), (second, chance + (1 - chance) * self.gain)):
                scores[str(case)] = sum(rng.random() < right for _ in range(self.samples)) / self.samples
        return first, second

    @property
    def difference(self) -> float:
        """The true difference of the models."""
        return (1 - self.a / (self.a + self.b)) * self.gain

    def detected(self, count: int, draws: int) -> float:
        """Share of comparisons of so many cases that detect a difference."""
        rng = random.Random(f"{self}/{count}")
        mixture = (ScoredEnv(prompts={str(case): str(case) for case in range(count)}),)
        verdicts = [verdict_of(of_changes(*self.draw(rng, count), mixture)) for _ in range(draws)]
        return fmean(verdict != "undetected" for verdict in verdicts)

    def predicted(self, count: int) -> float:
        """The power that first comparisons predict for so many cases; the mean over PILOTS of them."""
        rng = random.Random(f"pilot/{self}")
        pilots = [self.draw(rng, PILOT_CASES) for _ in range(PILOTS)]
        powers = [Power.of([b[case] - a[case] for case in a], UNIT) for a, b in pilots]
        return fmean(power.power(self.difference, count) for power in powers if power is not None)


SHAPES = {"any chance": (1.0, 1.0), "mostly hard": (0.5, 3.0), "mostly easy": (4.0, 0.5), "in the middle": (5.0, 5.0)}
SAME = [Population(name, *shape, samples) for name, shape in SHAPES.items() for samples in (1, 4)]
BETTER = [
    Population(name, *SHAPES[name], samples, gain)
    for name in ("any chance", "mostly hard", "mostly easy")
    for gain in (0.1, 0.25, 0.5)
    for samples in (1, 4)
]


def main() -> int:
    """All comparisons, as tables."""
    parser = argparse.ArgumentParser(description="False alarms and power of aitrain compare.")
    parser.add_argument("--draws", type=int, default=400, help="of each population and count (default: 400)")
    draws = parser.parse_args().draws
    with tempfile.TemporaryDirectory() as folder:
        verdicts = list(verdicts_of_one_model(Path(folder)))
    undetected = verdicts.count("undetected")
    print(f"the tiny model twice: no detectable difference in {undetected} of {SEEDS} seeds\n", flush=True)
    problems = ["the tiny model twice"] if undetected < UNDETECTED_OF_FEW * SEEDS else []

    print(f"| no detectable difference, a model twice | {' | '.join(f'{count} cases' for count in COUNTS)} |")
    print("|---" * (1 + len(COUNTS)) + "|")
    of_all = list[float]()
    for population in SAME:
        shares = [1 - population.detected(count, draws) for count in COUNTS]
        print(f"| {_named(population)} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)
        problems += [f"{_named(population)}: {share:.3f}" for share in shares if share < UNDETECTED_OF_FEW]
        of_all += shares
    print(f"\nall: {fmean(of_all):.3f}")
    problems += [f"all: {fmean(of_all):.3f}"] if fmean(of_all) < UNDETECTED else []

    print(f"\n| power, predicted (simulated) | {' | '.join(f'{count} cases' for count in COUNTS)} |")
    print("|---" * (1 + len(COUNTS)) + "|")
    for population in BETTER:
        pairs = [(population.predicted(count), population.detected(count, draws)) for count in COUNTS]
        texts = [f"{predicted:.2f} ({simulated:.2f})" for predicted, simulated in pairs]
        print(f"| {_named(population)} | {' | '.join(texts)} |", flush=True)
        problems += [
            f"{_named(population)}: power {one:.2f} ({two:.2f})" for one, two in pairs if abs(one - two) > POINTS
        ]
    print("\n".join(problems))
    return 1 if problems else 0


def _named(population: Population) -> str:
    difference = f", +{population.difference:.3f}" if population.gain else ""
    return f"{population.name}, {population.samples} samples{difference}".replace("1 samples", "1 sample")


if __name__ == "__main__":
    sys.exit(main())
