"""What a run measured: its episodes and the seconds of its steps, and the fleet of the simulation that is as fast."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder
from benchmarks.fleet_simulation import (
    Fleet,
    SimulatedEpisode,
    SimulatedTurn,
    parts_of,
    simulate_step,
    tokens_of,
)

SEQUENCE_SHARE = 0.01
"""What each sequence is assumed to add to a decoding step of a server, where it was not measured."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run measured: its groups of episodes by step, and the seconds of the parts of its steps."""

    groups: Mapping[tuple[int, int], Sequence[SimulatedEpisode]]
    lines: Sequence[MetricsLine]
    processes: int = 1

    @classmethod
    def read(cls, folder: Path, skipped: int = 1) -> MeasuredRun:
        """From rollouts and metrics.jsonl; without the first steps, which are slow.

        Raises:
            ValueError: it has no steps that were timed.
        """
        run = RunFolder(folder)
        lines = [line for line in read_metrics(run.metrics) if line.values.get("time/step") and line.step > skipped]
        groups: dict[tuple[int, int], list[SimulatedEpisode]] = {}
        for file in sorted(run.rollouts.glob("*.jsonl")):
            for record in read_rollouts(file):
                if not record.eval_phase and record.step > skipped and record.turns:
                    groups.setdefault((record.step, record.group or 0), []).append(simulated(record))
        if not lines or not groups:
            raise ValueError(f"{folder} has no timed steps after step {skipped}")
        return cls(groups, lines, len(list(run.rollouts.glob("*.jsonl"))))

    def episodes_of(self, step: int) -> Sequence[SimulatedEpisode]:
        """The episodes of process 0 in a step, which is the one that the metrics have the seconds of."""
        return parts_of(self._all_of(step), self.processes)[0]

    @property
    def steps(self) -> list[list[SimulatedEpisode]]:
        """The episodes of all processes, of each timed step."""
        return [self._all_of(line.step) for line in self.lines]

    def _all_of(self, step: int) -> list[SimulatedEpisode]:
        return [episode for key in sorted(self.groups) if key[0] == step for episode in self.groups[key]]

    def draw(self, groups: int, seed: int = 0) -> list[SimulatedEpisode]:
        """Episodes of whole groups, drawn from all of them: those of a group are alike."""
        chosen = random.Random(seed).choices([self.groups[key] for key in sorted(self.groups)], k=groups)
        return [episode for group in chosen for episode in group]

    def mean(self, name: str) -> float:
        """Mean over the timed steps."""
        values = self.each(name)
        return sum(values) / len(values) if values else 0.0

    def each(self, name: str) -> list[float]:
        """A metric of each timed step that has it."""
        return [value for line in self.lines if (value := line.values.get(name)) is not None]

    @property
    def rollouts(self) -> list[float]:
        """Seconds of each rollout."""
        pairs = zip(self.each("time/step"), self.each("time/optimize"), strict=True)
        return [step - optimizing for step, optimizing in pairs]

    @property
    def rollout_seconds(self) -> float:
        """Mean seconds of a rollout."""
        return self.mean("time/step") - self.mean("time/optimize")


def simulated(record: RolloutRecord) -> SimulatedEpisode:
    """The episode of a rollout record, which has the seconds of all calls of the environment together."""
    each = (record.seconds or 0.0) / len(record.turns)
    return tuple(SimulatedTurn(turn.tokens or 0, each) for turn in record.turns)


def calibrate(runs: Sequence[MeasuredRun], fleet: Fleet) -> Fleet:
    """A fleet that generates in rounds, as fast as these runs did.

    Runs with different numbers of episodes tell what each sequence adds to a decoding step, and what training takes
    apart from its tokens. With one run, a decoding step takes as long with any number of sequences, and training is
    proportional to the tokens.
    """
    training = [
        (float(tokens_of(run.episodes_of(line.step))), 1.0, line.values.get("time/optimize") or 0.0)
        for run in runs
        for line in run.lines
    ]
    fit = _line if len(runs) > 1 else _proportional
    (token, sequence), (train, fixed) = fit(list(_decoding(runs))), fit(training)
    own, turns = 0.0, 0
    for run in runs:
        rest = run.rollout_seconds - run.mean("time/generate") - run.mean("time/environment")
        own += max(0.0, rest) * len(run.lines)
        turns += sum(len(episode) for line in run.lines for episode in run.episodes_of(line.step))
    return replace(
        fleet,
        token_seconds=token, sequence_seconds=sequence, fixed_seconds=fixed, train_seconds=train,
        turn_seconds=own / max(1, turns),
    )  # fmt: skip


def calibrate_servers(run: MeasuredRun, fleet: Fleet) -> Fleet:
    """A fleet of servers that decode as fast as those of the run, whose number the fleet has.

    One run cannot tell what each sequence adds to a decoding step; a hundredth of the step is assumed.
    """
    slow, fast = 10.0, 1e-7

    def with_speed(seconds: float) -> Fleet:
        return replace(fleet, token_seconds=seconds, sequence_seconds=seconds * SEQUENCE_SHARE)

    while slow > 1.01 * fast:
        middle = math.sqrt(slow * fast)
        rollout = sum(simulate_step(with_speed(middle), episodes).rollout for episodes in run.steps) / len(run.steps)
        slow, fast = (middle, fast) if rollout > run.rollout_seconds else (slow, middle)
    tokens = sum(tokens_of(run.episodes_of(line.step)) for line in run.lines) / len(run.lines)
    return replace(with_speed(fast), train_seconds=run.mean("time/optimize") / max(1.0, tokens))


def _decoding(runs: Iterable[MeasuredRun]) -> Iterator[tuple[float, float, float]]:
    """Of each timed step: its decoding steps, their sequences added up, and the seconds."""
    for run in runs:
        for line in run.lines:
            episodes = run.episodes_of(line.step)
            steps = sequences = 0.0
            for number in range(max(map(len, episodes), default=0)):
                live = [episode[number].tokens for episode in episodes if len(episode) > number]
                steps += max(live)
                sequences += max(live) * len(live)
            yield steps, sequences, line.values.get("time/generate") or 0.0


def _proportional(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """z = a x."""
    return sum(row[2] for row in rows) / max(1e-12, sum(row[0] for row in rows)), 0.0


def _line(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit z = a x + b y with a and b not negative, without the quarter of the rows that is furthest off: steps in which
    the machine did something else. b is 0 where the rows cannot tell them apart."""
    a, b = _least_squares(rows)
    nearest = sorted(rows, key=lambda row: abs(row[2] - a * row[0] - b * row[1]))[: math.ceil(0.75 * len(rows))]
    return _least_squares(nearest)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xz, yz = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-3 * xx * yy:
        a, b = (yy * xz - xy * yz) / determinant, (xx * yz - xy * xz) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if a < 0:
            return 0.0, yz / yy
    return (xz / xx if xx else 0.0), 0.0
