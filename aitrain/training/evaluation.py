"""Score a policy on the held-out cases, without disturbing the training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from aitrain.errors import EnvironmentFailed
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode
from aitrain.runs.held_out import Scoring, by_case, mean_score
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts
from aitrain.runs.run_folder import RunFolder, to_jsonable
from aitrain.training.dataset import Cases
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts

BATCH = 32
"""Completions generated at a time, where training does not take more anyway: without gradients there is room."""


@dataclass(frozen=True)
class HeldOutSample:
    """One episode of a scoring: the held-out case, by its place among them, and the number of the case's sample."""

    place: int
    sample: int


@dataclass(frozen=True)
class ScoringName:
    """What the records of a scoring say of it: steps done, optimizer steps behind the weights, and which scoring."""

    step: int
    weight_version: int
    eval_phase: str


@dataclass(frozen=True)
class Scorings:
    """One scoring with sampled and one with greedy completions."""

    sampled: Scoring = field(default_factory=dict)
    greedy: Scoring = field(default_factory=dict)

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Mean score of sampled and of greedy completions, None where nothing was scored."""
        return mean_score(self.sampled), mean_score(self.greedy)


@dataclass(frozen=True)
class HeldOut:
    """The held-out cases, how often each is sampled, and the seed of that: the same one every time, so that two scores
    differ by the policy and not by the dice."""

    cases: Cases
    rollouts: PolicyRollouts
    write: Callable[[list[RolloutRecord]], None]
    """Gets the rollout records of this process."""
    seed: int
    samples: int = 1
    batch_size: int = BATCH
    """Episodes that each process plays at a time."""

    def scores(self, when: str, policy_step: int | None = None, fresh: bool = False) -> Scorings:
        """Every case, `samples` times sampled and once greedily. `policy_step`: the step that the weights are of, where
        it is not the last one. `fresh`: with samples that no other scoring has had."""
        first = self.samples if fresh else 0
        step = self.rollouts.weight_version()
        named = ScoringName(step, step if policy_step is None else policy_step, when)
        return self._scorings(named, self._draws(first, self.samples), self._draws(first, 1))

    def scores_before(self, recorded: Recorded) -> Scorings:
        """Every case with the initial policy, which must be the present one; what is on record is not played again."""
        named = ScoringName(0, 0, "before")
        missing = [
            [draw for draw in self._draws(0, samples) if self._key(draw) not in recorded[decoding]]
            for decoding, samples in (("sampled", self.samples), ("greedy", 1))
        ]
        new = self._scorings(named, *missing)
        known = {
            decoding: [(str(row), score) for (row, _), score in found.items() if score is not None]
            for decoding, found in recorded.items()
        }
        return Scorings(_joined(known["sampled"], new.sampled), _joined(known["greedy"], new.greedy))

    def _draws(self, first: int, samples: int) -> list[HeldOutSample]:
        return [HeldOutSample(place, first + sample) for place in range(len(self.cases)) for sample in range(samples)]

    def _key(self, draw: HeldOutSample) -> tuple[int, int]:
        return self.cases[draw.place].number, draw.sample

    def _scorings(self, named: ScoringName, sampled: list[HeldOutSample], greedy: list[HeldOutSample]) -> Scorings:
        return Scorings(
            self._score(replace(named, eval_phase=f"{named.eval_phase}_sampled"), sampled, Decoding.SEEDED),
            self._score(replace(named, eval_phase=f"{named.eval_phase}_greedy"), greedy, Decoding.GREEDY),
        )

    def _score(self, named: ScoringName, samples: list[HeldOutSample], decoding: Decoding) -> Scoring:
        """The scores of these episodes, the same on every process; `named` goes into their records."""
        if not samples:
            return {}
        with random_state_of_its_own(self.seed), self.rollouts.evaluating():
            own = [pair for batch in self._batches(samples) for pair in self._played(batch, decoding)]
        self.write([_record(episode, named, sample) for sample, episode in own])
        return _gathered(self.rollouts, own)

    def _batches(self, samples: list[HeldOutSample]) -> Iterator[list[HeldOutSample]]:
        """This process's share. All processes have the same number of batches, the last of which may be shorter than
        others or empty: they play together."""
        accelerator = self.rollouts.accelerator
        share = samples[accelerator.process_index :: accelerator.num_processes]
        length = -(-len(samples) // accelerator.num_processes)
        for start in range(0, length, self.batch_size):
            yield share[start : start + self.batch_size]

    def _played(self, samples: list[HeldOutSample], decoding: Decoding) -> list[tuple[HeldOutSample, Episode]]:
        """The environment's seed of a held-out case is the same every time and for all of its samples; the sampling
        seed of a sample is the same every time and on every process."""
        cases = [self.cases[sample.place] for sample in samples]
        numbered = [(case.number, sample.sample) for case, sample in zip(cases, samples, strict=True)]
        seeds = [self.rollouts.env_seed("held-out", number) for number, _ in numbered]
        sampling_seeds = [self.rollouts.sampling_seed("held-out", *names) for names in numbered]
        return list(zip(samples, self.rollouts.play(cases, seeds, sampling_seeds, decoding), strict=True))


def _record(episode: Episode, named: ScoringName, sample: HeldOutSample) -> RolloutRecord:
    """The turns get the scoring's weight version: an engine counts the optimizer steps that were done, also where the
    weights of an earlier step are scored."""
    record = episode_record(episode, named.step, named.weight_version)
    turns = tuple(replace(turn, weight_version=named.weight_version) for turn in record.turns)
    return replace(record, eval_phase=named.eval_phase, sample=sample.sample, turns=turns)


def _gathered(rollouts: PolicyRollouts, own: list[tuple[HeldOutSample, Episode]]) -> Scoring:
    """Of all processes, in the order of the draws; nothing scored at all means that the environment does not work."""
    scores = gather_object(
        [((d.place, d.sample), e.case.number, e.result.score) for d, e in own if e.result.score is not None]
    )
    failures = gather_object([e.result.failure.kind for _, e in own if e.result.failure is not None])
    if failures:
        rollouts.tell_failures([episode for _, episode in own])
    rollouts.check_abandoned(sum(gather_object([rollouts.abandoned_threads])))
    if failures and not scores:
        raise EnvironmentFailed(
            f"The environment failed on all {len(failures)} held-out cases ({', '.join(sorted(set(failures)))}).\n"
            "The first failure is shown above; --debug shows all that the run printed."
        )
    return by_case((str(row), score) for _, row, score in sorted(scores))


def _joined(known: list[tuple[str, float]], new: Scoring) -> Scoring:
    return by_case([*known, *((case, score) for case, scores in new.items() for score in scores)])


# -- what a resumed run has on record

Recorded: TypeAlias = Mapping[str, Mapping[tuple[int, int], float | None]]
"""By decoding: the scores before training by row and sample, None for those that could not be scored."""


def recorded_before(folder: RunFolder, cases: Cases) -> Recorded:
    """What the first part of a run recorded of these held-out cases, the same on every process. A row with another
    prompt is another case."""
    parcel: list[Any] = [_read_before(folder, cases) if PartialState().is_main_process else None]
    broadcast_object_list(parcel)
    found: Recorded = parcel[0]
    return found


def _read_before(folder: RunFolder, cases: Cases) -> Recorded:
    prompts = {case.number: to_jsonable(case.prompt) for case in cases}
    found: dict[str, dict[tuple[int, int], float | None]] = {"sampled": {}, "greedy": {}}
    for file in sorted(folder.rollouts.glob("*.jsonl")):
        for record in read_rollouts(file):
            when, _, decoding = record.eval_phase.rpartition("_")
            row = record.row_number
            if when == "before" and row in prompts and record.prompt == prompts[row]:
                found[decoding][row, record.sample or 0] = record.score
    return found


@contextmanager
def random_state_of_its_own(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's generators seeded, and afterwards where they had been."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    with torch.random.fork_rng(devices=_devices()):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)


def _devices() -> list[Any]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
