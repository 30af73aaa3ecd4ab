"""Score a policy on the held-out cases, without disturbing the training."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, set_seed

from aitrain.errors import EnvironmentFailed
from aitrain.training.dataset import Cases
from aitrain.training.rollout import Episode
from aitrain.training.trainer import EpisodeTrainer, evaluation_mode

BATCH = 32
"""Completions generated at a time, where training does not take more anyway: without gradients there is room."""

SAMPLE = 0
"""The number of the sample of a held-out case: there is one."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out cases and the seed that their completions are sampled with: the same one every time, so that two
    scores differ by the policy and not by the dice."""

    cases: Cases
    seed: int

    def scores(self, trainer: EpisodeTrainer, when: str) -> tuple[float | None, float | None]:
        """Mean score of sampled and of greedy completions, 0 to 1; None where there is no case or no score."""
        if not len(self.cases):
            return None, None
        return self._score(trainer, f"{when}_sampled"), self._score(trainer, f"{when}_greedy")

    def _score(self, trainer: EpisodeTrainer, when: str) -> float | None:
        decoding = trainer.greedy() if when.endswith("greedy") else trainer.seeded()
        with random_state_of_its_own(self.seed), evaluation_mode(trainer.model), decoding:
            own = [episode for batch in self._batches(trainer) for episode in self._played(trainer, batch)]
        step = trainer.state.global_step
        named = {"step": step, "policy_step": step, "when": when}
        trainer.hooks.write([named | episode.record() for episode in own])
        return _mean(trainer, own)

    def _played(self, trainer: EpisodeTrainer, numbers: list[int]) -> list[Episode]:
        """The seeds of a held-out case, the environment's and the one that it is sampled with, are the same every time
        and on whichever process it is played."""
        seeds = [trainer.seed_of("held-out", number) for number in numbers]
        sampling_seeds = [trainer.sampling_seed("held-out", number, SAMPLE) for number in numbers]
        return trainer.play([self.cases[number] for number in numbers], seeds, sampling_seeds)

    def _batches(self, trainer: EpisodeTrainer) -> Iterator[list[int]]:
        """This process's share, as numbers of cases, in generation batches. All processes have equally many batches,
        where the last ones may be shorter than others or empty: to play is something that they do together."""
        world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        share = range(rank, len(self.cases), world)
        length = -(-len(self.cases) // world)
        size = max(BATCH, trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)
        for start in range(0, length, size):
            yield list(share[start : start + size])


def _mean(trainer: EpisodeTrainer, episodes: list[Episode]) -> float | None:
    """Over all processes; nothing scored at all means that the environment does not work."""
    scores = gather_object([e.scored.score for e in episodes if e.scored.score is not None])
    failures = gather_object([e.scored.failure.kind for e in episodes if e.scored.failure is not None])
    if failures:
        trainer.tell_failures(episodes)
    if failures and not scores:
        raise EnvironmentFailed(
            f"The environment failed on all {len(failures)} held-out cases ({', '.join(sorted(set(failures)))}).\n"
            "The first failure is shown above; --debug shows all that the run printed."
        )
    return math.fsum(scores) / len(scores) if scores else None  # the same sum in whatever order processes have them


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
