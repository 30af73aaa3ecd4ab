"""Whether `aitrain compare` finds no difference where there is none, and whether its power is the share of comparisons
that detect a difference.

The tiny model is evaluated once, with 200 samples of each case. Each of 100 comparisons takes two of them, which were
sampled with different seeds, through the whole of `aitrain compare`. Then come comparisons of drawn scores, whose
true difference is known.
"""

from __future__ import annotations

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
from aitrain.runs.held_out import verdict_of
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.records import read_rollouts
from aitrain.runs.statistics import Power, ScoredEnv, of_changes
from benchmarks.measuring import Asked, Figure

SEEDS = 100
DRAWS = 400
"""Of each population and number of cases."""
UNDETECTED = 0.95
"""The least share of comparisons of a model with itself that find no difference."""
UNDETECTED_OF_FEW = 0.93
"""Of one kind of comparisons, of which there are a hundred or a few more."""
POINTS = 0.10
"""The most between predicted and simulated power."""
COUNTS = (16, 64, 200)
PILOTS = 40
"""Comparisons from which a power is predicted; the mean of their predictions counts."""
PILOT_CASES = 64

Scores = dict[str, float]


# -- the tiny model


def verdicts_of_one_model(folder: Path, seeds: int) -> Iterator[str]:
    """The verdict of each seed's comparison, from one eval with two samples of each case for each seed."""
    flags = ["--rl-env=envs.arithmetic", "--rl-max-new-tokens=8", "--cases=64", f"--samples={2 * seeds}"]
    command = [sys.executable, "-m", "aitrain", "eval", "tiny", *flags, "--decoding=sampled"]
    subprocess.run([*command, f"--output-dir={folder}/runs"], check=True, stdout=subprocess.DEVNULL)
    records = [record for run in folder.glob("runs/*") for record in read_rollouts(run)]
    for seed in range(seeds):
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

    def __str__(self) -> str:
        return f"{self.name}, {self.samples} samples, +{self.difference:.3f}"

    def draw(self, rng: random.Random, count: int) -> tuple[Scores, Scores]:
        """The scores of both models on `count` cases: means of samples of 0 or 1."""
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
        """Share of comparisons with this number of cases that detect a difference."""
        rng = random.Random(f"{self!r}/{count}")
        mixture = (ScoredEnv(prompts={str(case): str(case) for case in range(count)}),)
        verdicts = [verdict_of(of_changes(*self.draw(rng, count), mixture)) for _ in range(draws)]
        return fmean(verdict != "undetected" for verdict in verdicts)

    def predicted(self, count: int) -> float:
        """The power that first comparisons predict for `count` cases; the mean over PILOTS of them."""
        rng = random.Random(f"pilot/{self!r}")
        pilots = [self.draw(rng, PILOT_CASES) for _ in range(PILOTS)]
        powers = [Power.of([b[case] - a[case] for case in a]) for a, b in pilots]
        return fmean(power.power(self.difference, count) for power in powers if power is not None)


SHAPES = {"any chance": (1.0, 1.0), "mostly hard": (0.5, 3.0), "mostly easy": (4.0, 0.5), "in the middle": (5.0, 5.0)}
SAME = [Population(name, *shape, samples) for name, shape in SHAPES.items() for samples in (1, 4)]
BETTER = [
    Population(name, *SHAPES[name], samples, gain)
    for name in ("any chance", "mostly hard", "mostly easy")
    for gain in (0.1, 0.25, 0.5)
    for samples in (1, 4)
]


def measure(asked: Asked) -> Iterator[Figure]:
    """The tiny model, and for each population all numbers of cases."""
    seeds, draws = (3, 40) if asked.is_short else (SEEDS, DRAWS)
    with tempfile.TemporaryDirectory() as folder:
        same = [verdict == "undetected" for verdict in verdicts_of_one_model(Path(folder), seeds)]
    yield Figure(f"tiny model twice, {seeds} seeds: undetected", [fmean(same)], least=UNDETECTED_OF_FEW)
    some = slice(2 if asked.is_short else None)
    undetected = {one: [1 - one.detected(count, draws) for count in COUNTS] for one in SAME[some]}
    for population, shares in undetected.items():
        yield Figure(f"twice, {population}: undetected", shares, least=UNDETECTED_OF_FEW, is_each=True)
    yield Figure("all that are drawn twice: undetected", [fmean(map(fmean, undetected.values()))], least=UNDETECTED)
    for population in BETTER[some]:
        off = [abs(population.predicted(count) - population.detected(count, draws)) for count in COUNTS]
        yield Figure(f"{population}: power, predicted less simulated", off, POINTS, is_each=True)
