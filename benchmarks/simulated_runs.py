"""Simulated metrics of runs, healthy ones and ones with a planted condition, for benchmarks/diagnostics.py.

Each run has cases of different difficulty, sampled as a run samples them: by epochs or by refill, or of
two environments in turn. What a policy can do, and how long its completions are, wanders as first-order autoregressive
noise around curves; scores, lengths and held-out scores are drawn from there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Literal, TypeAlias

from aitrain.options.train import TrainConfig
from aitrain.runs.records import MetricsLine
from aitrain.runs.statistics import of_mean

Curve: TypeAlias = Callable[[float], float]
"""A value by the share of the run that is over, 0 to 1."""


def ramp(start: float, end: float, first: float = 0.0, last: float = 1.0) -> Curve:
    """From one value to another, smoothly, between two times."""

    def at(time: float) -> float:
        share = min(1.0, max(0.0, (time - first) / max(1e-9, last - first)))
        return start + (end - start) * share * share * (3 - 2 * share)

    return at


def steady(value: float) -> Curve:
    """Always the same value."""
    return lambda _: value


_SKILL, _LENGTH, _ENTROPY = ramp(-1.5, 1.5), steady(120.0), steady(1.0)


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    name: str
    finding: str = ""
    """What must be found; empty for a healthy run."""
    skill: Curve = _SKILL
    """Log-odds of a right answer to a case of mean difficulty."""
    held_out_skill: Curve | None = None
    length: Curve = _LENGTH
    entropy: Curve = _ENTROPY
    steps: tuple[int, int] = (120, 400)
    prompts: tuple[int, int] = (4, 16)
    generations: tuple[int, int] = (4, 8)
    cases: tuple[int, int] = (40, 400)
    spread: float = 1.5
    """Standard deviation of the difficulty of cases."""
    sampling: Literal["uniform", "refill"] = "uniform"
    environments: int = 1
    evaluations: int = 8
    wander: float = 0.3
    """Standard deviation of the wandering of the skill, and of a third of it of the logarithm of the length."""


def simulate(kind: Kind, seed: int) -> tuple[TrainConfig, list[MetricsLine]]:
    """The metrics of one run of a kind, with its scorings."""
    return TrainConfig(rl_sampling=kind.sampling), list(_Simulation(kind, seed).lines())


class _Simulation:
    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.draw = kind, random.Random(f"{kind.name} {seed}")
        self.steps = self.draw.randint(*kind.steps)
        self.prompts, self.group = self.draw.randint(*kind.prompts), self.draw.randint(*kind.generations)
        self.difficulty = [self.draw.gauss(0, kind.spread) for _ in range(self.draw.randint(*kind.cases))]
        self.held_out = [self.draw.gauss(0, kind.spread) for _ in range(48)]
        self.queue: list[int] = []
        self.correlation = self.draw.choice((0.0, 0.5, 0.9))

    def lines(self) -> Iterator[MetricsLine]:
        wander, stretch = 0.0, 0.0
        every = max(1, self.steps // max(1, self.kind.evaluations))
        yield self._scoring(0, 0.0)
        for step in range(1, self.steps + 1):
            fresh = math.sqrt(1 - self.correlation**2) * self.kind.wander
            wander = self.correlation * wander + self.draw.gauss(0, fresh)
            stretch = self.correlation * stretch + self.draw.gauss(0, fresh / 3)
            yield self._line(step, wander, stretch)
            if self.kind.evaluations and step % every == 0:
                yield self._scoring(step, wander)

    def _line(self, step: int, wander: float, stretch: float) -> MetricsLine:
        kind, time = self.kind, step / self.steps
        groups = [self._play(case, kind.skill(time) + wander) for case in self._cases()]
        if kind.sampling == "refill":
            groups = [group for group in groups if pvariance(group) > 0][: self.prompts] or groups
        scores = [score for group in groups for score in group]
        flat = fmean(float(pvariance(group) == 0) for group in groups)
        count = len(scores)
        values: dict[str, float | None] = {
            "reward": fmean(scores),
            "reward_std": fmean(math.sqrt(pvariance(group)) for group in groups),
            "frac_reward_zero_std": flat,
            "completions/mean_length": kind.length(time) * math.exp(self.draw.gauss(stretch, 0.4 / math.sqrt(count))),
            "completions/clipped_ratio": self._share(0.05, count),
            "unscored": self._share(0.0, count),
            "entropy": kind.entropy(time) * math.exp(self.draw.gauss(0, 0.1)),
        }
        return MetricsLine(step, values)

    def _cases(self) -> list[int]:
        size = self.prompts * (3 if self.kind.sampling == "refill" else 1)
        while len(self.queue) < size:
            order = list(range(len(self.difficulty)))
            self.draw.shuffle(order)
            self.queue += order
        taken, self.queue = self.queue[:size], self.queue[size:]
        return taken

    def _play(self, case: int, skill: float) -> list[float]:
        """Score of each completion of a group."""
        shift = 2.0 * (case % self.kind.environments)
        right = 1 / (1 + math.exp(self.difficulty[case] + shift - skill))
        return [float(self.draw.random() < right) for _ in range(self.group)]

    def _scoring(self, step: int, wander: float) -> MetricsLine:
        time = step / self.steps
        skill = (self.kind.held_out_skill or self.kind.skill)(time) + wander
        scores = [float(self.draw.random() < 1 / (1 + math.exp(hard - skill))) for hard in self.held_out]
        interval = of_mean(scores)
        assert interval is not None
        return MetricsLine(step, {"eval_score": interval["mean"], "eval_low": interval["low"]})

    def _share(self, chance: float, count: int) -> float:
        return fmean(float(self.draw.random() < chance) for _ in range(count))


HEALTHY = (
    Kind("learns steadily"),
    Kind("thinks longer and scores better", length=ramp(100, 320), skill=ramp(-2, 2)),
    Kind("solves its task early", skill=ramp(-1, 7, 0.0, 0.3), spread=1.0, entropy=ramp(1.0, 0.04)),
    Kind("does not learn", skill=steady(-0.5)),
    Kind("replaces groups without variance", length=ramp(100, 190), sampling="refill", skill=ramp(-2, 2)),
    Kind("trains two environments", environments=2, length=ramp(150, 120)),
    Kind("has few cases and small batches", cases=(6, 12), prompts=(2, 3), generations=(3, 4), wander=0.5),
    Kind("comes to answer yes or no", length=ramp(60, 3), entropy=ramp(1.5, 0.2)),
)

PLANTED = (
    Kind("longer at the same score", "length", skill=steady(-0.5), length=ramp(100, 260)),
    Kind(
        "longer after it has learned", "length", skill=ramp(-2, 1, 0, 0.3), length=ramp(90, 250, 0.4), steps=(400, 600)
    ),
    Kind(
        "held-out scores fall slowly",
        "held_out",
        held_out_skill=ramp(1.5, -1.0, 0.2),
        evaluations=12,
    ),
    Kind(
        "held-out scores fall, scored three times",
        "held_out",
        held_out_skill=ramp(2.0, -1.5),
        evaluations=2,
    ),
    Kind("collapses slowly", "held_out", skill=ramp(1.0, -6.0)),
    Kind(
        "collapses within twelve to thirty steps",
        "held_out",
        skill=lambda time: 1.0 if time < 0.35 else -8.0,
        steps=(12, 30),
        evaluations=4,
    ),
    Kind("a scorer that accepts anything", "top_score", skill=steady(30.0)),
    Kind("a judge that breaks", "top_score", skill=lambda time: -0.5 if time < 0.5 else 30.0, evaluations=0),
)
