"""Evaluation: plays cases with the policy and scores them, without changing the random state of a training around
it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from accelerate.utils import set_seed

from aitrain.environment.contract import Case
from aitrain.environment.runner import Runner
from aitrain.errors import EpisodesFailed, errors_of
from aitrain.redaction import to_jsonable
from aitrain.rollout.engine import Decoding
from aitrain.runs.held_out import DECODINGS, Scoring, bounds_of, grouped
from aitrain.runs.records import RolloutRecord, prompt_key, row_columns
from aitrain.runs.statistics import Mixture, ScoredEnv
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import MemberKey, PlayedEpisode, episode_record, finish

BATCH = 32
"""Minimum number of episodes that a rank plays at a time, as there is memory for them without gradients."""


@dataclass(frozen=True)
class EvalPlan:
    """Cases and samples of an evaluation. Equal plans use equal seeds, so that their scores differ only by the
    policy."""

    cases: Sequence[Case]
    samples: int = 1
    """Sampled episodes of each case; greedy decoding adds one."""
    first_sample: int = 0
    """Number of each case's first sample, from which its seed follows."""
    batch_size: int = BATCH
    """Episodes that each rank plays at a time."""
    decodings: tuple[str, ...] = DECODINGS
    mixture: Mixture = ()
    """The environments of the cases, if there are several."""

    def numbers(self, decoding: str) -> range:
        """Numbers of the episodes of each case with a decoding."""
        return range(self.first_sample, self.first_sample + (self.samples if decoding == "sampled" else 1))

    def shares(self, decoding: str, rollouts: PolicyRollouts) -> Iterator[tuple[int, list[MemberKey]]]:
        """This rank's share of each batch of one decoding, which may be empty, and the number of episodes before the
        batch. A key is the index of the case and the number of the sample. All samples of a case are in one share if
        the environment scores them together."""
        rank, processes = rollouts.accelerator.process_index, rollouts.accelerator.num_processes
        numbers, size = self.numbers(decoding), self.batch_size * processes
        keys = [(index, number) for index in range(len(self.cases)) for number in numbers]
        scores_groups = any(part.scores_groups for part in rollouts.rollout.runner.parts.values())
        if scores_groups:
            size = max(1, size // len(numbers)) * len(numbers)
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            yield (
                start,
                [key for key in batch if key[0] % processes == rank] if scores_groups else batch[rank::processes],
            )


@dataclass(frozen=True)
class EvalPhase:
    """Name and steps of an evaluation, for its records."""

    name: str
    """`before`, `step<N>` or `after`; the decoding is appended."""
    step: int
    """Optimizer steps done."""
    weight_version: int
    """Optimizer step of the weights."""


AfterBatch: TypeAlias = Callable[[list[PlayedEpisode], Scoring], None]
"""Called with a batch of all ranks, and the scores of its decoding until now."""


def evaluate(
    rollouts: PolicyRollouts,
    plan: EvalPlan,
    phase: EvalPhase,
    write: Callable[[list[RolloutRecord]], None],
    after_batch: AfterBatch = lambda *_: None,
) -> dict[str, Scoring]:
    """Score the cases with the policy's present weights; returns the scores by decoding, the same on every rank.

    Every rank must call this. `write` gets the records of the rank's own episodes after each batch, as often on every
    rank.

    Raises:
        EpisodesFailed: an environment failed on all of its cases: without it, the mean score would be that of the
            others.
        EnvironmentFailed: too many calls hang.
        ServerFailed: a vLLM server failed one of the ranks.
    """
    scorings: dict[str, Scoring] = {}
    for name in plan.decodings:
        scores: list[tuple[str, float]] = []
        failed, scored = set[str](), set[str]()
        for done, keys in plan.shares(name, rollouts):
            cases, samples = [plan.cases[index] for index, _ in keys], [(sample,) for _, sample in keys]
            decoding = Decoding.SEEDED if name == "sampled" else Decoding.GREEDY
            rollouts.settle()  # a batch that is played ahead draws from the generators that are seeded now
            with isolated_random_state(rollouts.run_seed + done), rollouts.evaluating():
                own = dict(zip(keys, rollouts.play(cases, "held-out", samples, decoding), strict=True))
                played = finish(rollouts, own)
            # the engine's weight version is the number of steps done, also if those of an earlier step are evaluated
            steps, label = (phase.step, phase.weight_version), f"{phase.name}_{name}"
            write(
                [
                    episode_record(episode, *steps, is_first=sample == 0, eval_phase=label, sample=sample)
                    for (_, sample), episode in own.items()
                ]
            )
            scores += [(str(plan.cases[one.key[0]].number), one.score) for one in played if one.score is not None]
            failed |= {one.env for one in played if one.failure is not None}
            scored |= {one.env for one in played if one.score is not None}
            rollouts.report(played)
            after_batch(played, grouped(scores))
        scorings[name] = grouped(scores)
        for env in sorted(failed - scored):
            with errors_of(env):
                raise EpisodesFailed(
                    f"The environment failed on all {name} episodes of held-out cases.\n"
                    "aitrain env check finds such failures without a model. The first one:\n"
                    f"{rollouts.failures.of(env).first_failure}"
                )
    return scorings


def content_of(case: Case) -> object:
    """The prompt of a case as a record has it, or the other columns of its row if there is none."""
    return to_jsonable(case.prompt or row_columns(case.row))


@contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch, and restore their states afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None  # which fork_rng leaves out
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)


# -- the environments of held-out scores


def mixture_of(runner: Runner, held_out: Sequence[Case]) -> Mixture:
    """The environments with their held-out cases."""
    shares = runner.config.env_shares
    return tuple(
        ScoredEnv(
            name,
            shares[name],
            bounds_of(part.config.rl_score_range),
            {str(case.number): prompt_key(to_jsonable(case.prompt)) for case in held_out if case.env == name},
        )
        for name, part in runner.parts.items()
    )
