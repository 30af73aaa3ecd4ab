"""Evaluation: plays cases with the policy and scores them, without changing the random state of a training around
it."""

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

from aitrain.environment.contract import scores_groups
from aitrain.environment.dataset import Cases
from aitrain.errors import EnvironmentFailed
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode
from aitrain.runs.held_out import Scoring, by_case, mean_score
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts, row_columns
from aitrain.runs.run_folder import RunFolder, to_jsonable
from aitrain.training.episode_groups import finish_groups
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts

BATCH = 32
"""Minimum number of episodes that a rank plays at a time, as there is memory for them without gradients."""

RecordedScores: TypeAlias = Mapping[str, Mapping[tuple[int, int], float | None]]
"""Scores by decoding, row number and sample number; None for episodes that could not be scored."""


@dataclass(frozen=True)
class EvalPlan:
    """Cases and samples of an evaluation. Equal plans use equal seeds, so that their scores differ only by the
    policy."""

    cases: Cases
    seed: int = 0
    samples: int = 1
    """Sampled episodes of each case; greedy decoding adds one."""
    first_sample: int = 0
    """Number of each case's first sample, from which its seed follows."""
    batch_size: int = BATCH
    recorded: RecordedScores = field(default_factory=dict)
    """Known scores; their episodes are not played again."""


@dataclass(frozen=True)
class EvalPhase:
    """Name and steps of an evaluation, for its records."""

    name: str
    """`before`, `step<N>` or `after`; the decoding is appended."""
    step: int
    """Optimizer steps done."""
    weight_version: int
    """Optimizer step of the weights."""


@dataclass(frozen=True)
class EvalScores:
    """The scores of an evaluation, with sampled and with greedy completions."""

    sampled: Scoring = field(default_factory=dict)
    greedy: Scoring = field(default_factory=dict)

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Mean score of sampled and of greedy completions, None where nothing was scored."""
        return mean_score(self.sampled), mean_score(self.greedy)


@dataclass(frozen=True)
class _Sample:
    """One episode to play: the case's index in the plan, its row, and the number of the sample."""

    case: int
    row: int
    number: int


def evaluate(
    rollouts: PolicyRollouts, plan: EvalPlan, phase: EvalPhase, write: Callable[[list[RolloutRecord]], None]
) -> EvalScores:
    """Score the cases with the policy's present weights; returns the same scores on every rank.

    Every rank must call this. `write` gets the records of the rank's own episodes.

    Raises:
        EnvironmentFailed: no case could be scored, or too many calls hang.
        ServerFailed: a vLLM server failed one of the ranks.
    """
    scorings = []
    for name, decoding, samples in (("sampled", Decoding.SEEDED, plan.samples), ("greedy", Decoding.GREEDY, 1)):
        recorded = plan.recorded.get(name, {})
        if scores_groups(rollouts.rollout.runner.environment):
            recorded = _whole_groups(recorded, range(plan.first_sample, plan.first_sample + samples))
        missing = [
            _Sample(index, case.number, number)
            for index, case in enumerate(plan.cases)
            for number in range(plan.first_sample, plan.first_sample + samples)
            if (case.number, number) not in recorded
        ]
        scores = [(str(row), score) for (row, _), score in recorded.items() if score is not None]
        if missing:
            with isolated_random_state(plan.seed), rollouts.evaluating():
                played = _play(rollouts, plan, missing, decoding)
            here = replace(phase, name=f"{phase.name}_{name}")
            write([_record(episode, here, sample) for sample, episode in played])
            scores += _gather_scores(rollouts, played)
        scorings.append(by_case(scores))
    return EvalScores(*scorings)


def _play(
    rollouts: PolicyRollouts, plan: EvalPlan, samples: list[_Sample], decoding: Decoding
) -> list[tuple[_Sample, Episode]]:
    """This rank's share of the episodes. All ranks play the same number of batches together; a rank's last ones may be
    shorter or empty. A case has one environment seed, and each sample its own sampling seed, the same on any rank."""
    ranks, rank = rollouts.accelerator.num_processes, rollouts.accelerator.process_index
    share, longest = samples[rank::ranks], -(-len(samples) // ranks)
    episodes: list[Episode] = []
    for start in range(0, longest, plan.batch_size):
        batch = share[start : start + plan.batch_size]
        cases = [plan.cases[sample.case] for sample in batch]
        seeds = [rollouts.env_seed("held-out", sample.row) for sample in batch]
        sampling_seeds = [rollouts.sampling_seed("held-out", sample.row, sample.number) for sample in batch]
        episodes += rollouts.play(cases, seeds, sampling_seeds, decoding)
    finish_groups(rollouts, episodes, [(sample.case, sample.number) for sample in share])
    return list(zip(share, episodes, strict=True))


def _whole_groups(
    recorded: Mapping[tuple[int, int], float | None], numbers: range
) -> Mapping[tuple[int, int], float | None]:
    """The recorded scores of cases that have all samples: those of a case are scored together."""
    return {key: score for key, score in recorded.items() if all((key[0], number) in recorded for number in numbers)}


def _record(episode: Episode, phase: EvalPhase, sample: _Sample) -> RolloutRecord:
    """The record of an episode, with the weight version of the evaluation: the engine's is the number of optimizer
    steps done, also if the weights of an earlier step are evaluated."""
    record = episode_record(episode, phase.step, phase.weight_version)
    turns = tuple(replace(turn, weight_version=phase.weight_version) for turn in record.turns)
    prompt = record.rendered_prompt if sample.number == 0 else ""  # the samples of a case have the same one
    return replace(record, eval_phase=phase.name, sample=sample.number, turns=turns, rendered_prompt=prompt)


def _gather_scores(rollouts: PolicyRollouts, played: list[tuple[_Sample, Episode]]) -> list[tuple[str, float]]:
    """(row, score) of all ranks, in the order of the plan."""
    results = [(sample, episode.result) for sample, episode in played]
    own = [(one.case, one.number, one.row, result.score) for one, result in results if result.score is not None]
    scores = gather_object(own)
    failures = gather_object([result.failure.kind for _, result in results if result.failure is not None])
    if failures:
        rollouts.report_failures([episode for _, episode in played])
    rollouts.check_abandoned(sum(gather_object([rollouts.abandoned_threads])))
    if failures and not scores:
        raise EnvironmentFailed(
            f"The environment failed on all {len(failures)} held-out cases ({', '.join(sorted(set(failures)))}).\n"
            "The first failure is shown above; --debug shows all that the run printed."
        )
    return [(str(row), score) for _, _, row, score in sorted(scores)]


# -- recorded scores of a resumed run


def recorded_before(folder: RunFolder, cases: Cases) -> RecordedScores:
    """The recorded scores before training of these cases, the same on every rank; without rows whose prompt has
    changed, or the other columns if there is no prompt."""
    found: list[Any] = [_read_before(folder, cases) if PartialState().is_main_process else None]
    broadcast_object_list(found)
    scores: RecordedScores = found[0]
    return scores


def _read_before(folder: RunFolder, cases: Cases) -> RecordedScores:
    asked = {case.number: to_jsonable(case.prompt or row_columns(case.row)) for case in cases}
    found: dict[str, dict[tuple[int, int], float | None]] = {"sampled": {}, "greedy": {}}
    for file in sorted(folder.rollouts.glob("*.jsonl")):
        for record in read_rollouts(file):
            phase, _, decoding = record.eval_phase.rpartition("_")
            row = record.row_number
            if phase == "before" and row in asked and (record.prompt or record.row) == asked[row]:
                found[decoding][row, record.sample or 0] = record.score
    return found


@contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch, and restore their states afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)
