"""Score a policy on the held-out cases, without disturbing the training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from aitrain.errors import EnvironmentFailed
from aitrain.run_folder import RunFolder, to_jsonable
from aitrain.runs.held_out import Scoring, by_case, mean_score
from aitrain.runs.rollout_record import read_rollouts
from aitrain.training.dataset import Cases
from aitrain.training.episode_record import episode_record
from aitrain.training.rollout import Episode
from aitrain.training.scopes import evaluation_mode
from aitrain.training.trainer import EpisodeTrainer

BATCH = 32
"""Completions generated at a time, where training does not take more anyway: without gradients there is room."""


@dataclass(frozen=True)
class Draw:
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
    seed: int
    samples: int = 1

    def scores(
        self, trainer: EpisodeTrainer, when: str, policy_step: int | None = None, fresh: bool = False
    ) -> Scorings:
        """Every case, `samples` times sampled and once greedily. `policy_step`: the step that the weights are of, where
        it is not the last one. `fresh`: with samples that no other scoring has had."""
        first = self.samples if fresh else 0
        step = trainer.state.global_step
        named = ScoringName(step, step if policy_step is None else policy_step, when)
        return self._scorings(trainer, named, self._draws(first, self.samples), self._draws(first, 1))

    def scores_before(self, trainer: EpisodeTrainer, recorded: Recorded) -> Scorings:
        """Every case with the initial policy, which must be the present one; what is on record is not played again."""
        named = ScoringName(0, 0, "before")
        missing = [
            [draw for draw in self._draws(0, samples) if self._key(draw) not in recorded[decoding]]
            for decoding, samples in (("sampled", self.samples), ("greedy", 1))
        ]
        new = self._scorings(trainer, named, *missing)
        known = {
            decoding: [(str(row), score) for (row, _), score in found.items() if score is not None]
            for decoding, found in recorded.items()
        }
        return Scorings(_joined(known["sampled"], new.sampled), _joined(known["greedy"], new.greedy))

    def _draws(self, first: int, samples: int) -> list[Draw]:
        return [Draw(place, first + sample) for place in range(len(self.cases)) for sample in range(samples)]

    def _key(self, draw: Draw) -> tuple[int, int]:
        return self.cases[draw.place].number, draw.sample

    def _scorings(
        self, trainer: EpisodeTrainer, named: ScoringName, sampled: list[Draw], greedy: list[Draw]
    ) -> Scorings:
        return Scorings(
            self._score(trainer, replace(named, eval_phase=f"{named.eval_phase}_sampled"), sampled),
            self._score(trainer, replace(named, eval_phase=f"{named.eval_phase}_greedy"), greedy),
        )

    def _score(self, trainer: EpisodeTrainer, named: ScoringName, draws: list[Draw]) -> Scoring:
        """The scores of these episodes, the same on every process; `named` goes into their records."""
        if not draws:
            return {}
        decoding = trainer.greedy() if named.eval_phase.endswith("greedy") else trainer.seeded()
        with random_state_of_its_own(self.seed), evaluation_mode(trainer.model), decoding:
            episodes = [episode for batch in _batches(trainer, draws) for episode in self._played(trainer, batch)]
        own = list(zip(_own(trainer, draws), episodes, strict=True))
        records = [(draw.sample, episode_record(episode, named.step, named.weight_version)) for draw, episode in own]
        trainer.hooks.write([replace(record, eval_phase=named.eval_phase, sample=sample) for sample, record in records])
        return _gathered(trainer, own)

    def _played(self, trainer: EpisodeTrainer, draws: list[Draw]) -> list[Episode]:
        """The environment's seed of a held-out case is the same every time and for all of its samples; the one that a
        sample is drawn with is the same every time and on whichever process it is played."""
        cases = [self.cases[draw.place] for draw in draws]
        numbered = [(case.number, draw.sample) for case, draw in zip(cases, draws, strict=True)]
        seeds = [trainer.seed_of("held-out", number) for number, _ in numbered]
        return trainer.play(cases, seeds, [trainer.sampling_seed("held-out", *one) for one in numbered])


def _own(trainer: EpisodeTrainer, draws: list[Draw]) -> list[Draw]:
    """This process's share."""
    return draws[trainer.accelerator.process_index :: trainer.accelerator.num_processes]


def _batches(trainer: EpisodeTrainer, draws: list[Draw]) -> Iterator[list[Draw]]:
    """This process's share in generation batches. All processes have equally many batches, where the last ones may be
    shorter than others or empty: to play is something that they do together."""
    share = _own(trainer, draws)
    length = -(-len(draws) // trainer.accelerator.num_processes)
    size = max(BATCH, trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)
    for start in range(0, length, size):
        yield share[start : start + size]


def _gathered(trainer: EpisodeTrainer, own: list[tuple[Draw, Episode]]) -> Scoring:
    """Of all processes, in the order of the draws; nothing scored at all means that the environment does not work."""
    scores = gather_object(
        [((d.place, d.sample), e.case.number, e.scored.score) for d, e in own if e.scored.score is not None]
    )
    failures = gather_object([e.scored.failure.kind for _, e in own if e.scored.failure is not None])
    if failures:
        trainer.tell_failures([episode for _, episode in own])
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
