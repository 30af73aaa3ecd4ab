"""Evaluation: plays cases with the policy and scores them, without changing the random state of a training around
it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from aitrain.environment.contract import Case
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.loader import errors_of
from aitrain.environment.runner import Runner
from aitrain.errors import EpisodesFailed
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode
from aitrain.runs.case_key import prompt_key
from aitrain.runs.held_out import DECODINGS, Scoring, bounds_of, by_case
from aitrain.runs.mixture import Mixture, ScoredEnv, cases_of, mean_score
from aitrain.runs.rollout_record import RolloutRecord, read_rollouts, row_columns
from aitrain.runs.run_folder import RunFolder, to_jsonable
from aitrain.runs.significance import FEWEST_CASES
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import finish_groups

BATCH = 32
"""Minimum number of episodes that a rank plays at a time, as there is memory for them without gradients."""

_DECODINGS = {"sampled": Decoding.SEEDED, "greedy": Decoding.GREEDY}

RecordedScores: TypeAlias = Mapping[str, Mapping[tuple[int, int], float | None]]
"""Scores by decoding, row number and sample number; None for episodes that could not be scored."""


@dataclass(frozen=True)
class EvalPlan:
    """Cases and samples of an evaluation. Equal plans use equal seeds, so that their scores differ only by the
    policy."""

    cases: Sequence[Case]
    seed: int = 0
    samples: int = 1
    """Sampled episodes of each case; greedy decoding adds one."""
    first_sample: int = 0
    """Number of each case's first sample, from which its seed follows."""
    batch_size: int = BATCH
    recorded: RecordedScores = field(default_factory=dict)
    """Known scores; their episodes are not played again."""
    decodings: tuple[str, ...] = DECODINGS
    mixture: Mixture = ()
    """The environments of the cases, if there are several."""

    def numbers(self, decoding: str) -> range:
        """Numbers of the episodes of each case with a decoding."""
        return range(self.first_sample, self.first_sample + (self.samples if decoding == "sampled" else 1))

    def position(self, sample: EvalSample, decoding: str) -> int:
        """Index of an episode among all with a decoding."""
        numbers = self.numbers(decoding)
        return sample.case * len(numbers) + numbers.index(sample.number)


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
    mixture: Mixture = ()

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Mean score of sampled and of greedy completions, None where nothing was scored."""
        return mean_score(self.sampled, self.mixture), mean_score(self.greedy, self.mixture)

    def means_of(self, one: ScoredEnv) -> dict[str, float | None]:
        """Mean score of one environment of several, as `score` and `greedy`."""
        return {"score": mean_score(self.sampled, (one,)), "greedy": mean_score(self.greedy, (one,))}


@dataclass(frozen=True)
class EvalSample:
    """One episode to play: the case's index in the plan, its row, and the number of the sample."""

    case: int
    row: int
    number: int


def evaluate(
    rollouts: PolicyRollouts, plan: EvalPlan, phase: EvalPhase, write: Callable[[list[RolloutRecord]], None]
) -> EvalScores:
    """Score the cases with the policy's present weights; returns the same scores on every rank.

    Every rank must call this. `write` gets the records of the rank's own episodes after each batch, as often on every
    rank.

    Raises:
        EpisodesFailed: an environment failed on all of its cases.
        EnvironmentFailed: too many calls hang.
        ServerFailed: a vLLM server failed one of the ranks.
    """
    size = plan.batch_size * rollouts.accelerator.num_processes
    is_grouped = rollouts.rollout.runner.scores_groups
    scorings: dict[str, Scoring] = {}
    for name in plan.decodings:
        decoding, here = _DECODINGS[name], replace(phase, name=f"{phase.name}_{name}")
        recorded = plan.recorded.get(name, {})
        if is_grouped:
            recorded = _whole_groups(recorded, plan.numbers(name))
        scores = [(str(row), score) for (row, _), score in recorded.items() if score is not None]
        failures: list[tuple[str, str]] = []
        for batch in eval_batches(plan, name, size, is_grouped, recorded):
            with isolated_random_state(plan.seed + plan.position(batch[0], name)), rollouts.evaluating():
                played = _play(rollouts, plan, batch, decoding)
            write([_record(episode, here, sample) for sample, episode in played])
            scores += _gather_scores(rollouts, played, failures)
        scorings[name] = by_case(scores)
        _check_each(plan, failures, scorings[name], rollouts.failures)
    return EvalScores(**scorings, mixture=plan.mixture)


def _check_each(plan: EvalPlan, failures: Sequence[tuple[str, str]], scoring: Scoring, reported: FailureCount) -> None:
    """Check that no environment failed on all of its cases: without it, the mean score would be that of the others.

    Raises:
        EpisodesFailed: one did.
    """
    scored = {case.env for case in plan.cases if str(case.number) in scoring}
    for env in sorted({env for env, _ in failures} - scored):
        kinds = [kind for name, kind in failures if name == env]
        with errors_of(env):
            first = reported.of(env).first_failure
            raise EpisodesFailed(
                f"The environment failed on all {len(kinds)} held-out cases ({', '.join(sorted(set(kinds)))}).\n"
                f"aitrain env check finds such failures without a model. The first one:\n{first}"
            )


def eval_batches(
    plan: EvalPlan, name: str, size: int, is_grouped: bool, recorded: Collection[tuple[int, int]] = ()
) -> list[list[EvalSample]]:
    """The episodes of one decoding in batches of `size`, without the recorded ones. All samples of a case are in one
    batch if the environment scores them together.

    If the recorded episodes are those of whole batches, the other batches are those of the whole plan.
    """
    numbers = plan.numbers(name)
    missing = [
        EvalSample(index, case.number, number)
        for index, case in enumerate(plan.cases)
        for number in numbers
        if (case.number, number) not in recorded
    ]
    if is_grouped:
        size = max(1, size // len(numbers)) * len(numbers)
    return [missing[start : start + size] for start in range(0, len(missing), size)]


def _play(
    rollouts: PolicyRollouts, plan: EvalPlan, batch: list[EvalSample], decoding: Decoding
) -> list[tuple[EvalSample, Episode]]:
    """This rank's share of a batch, which may be empty. A case has one environment seed, and each sample its own
    sampling seed, the same on any rank."""
    share = batch[rollouts.accelerator.process_index :: rollouts.accelerator.num_processes]
    cases = [plan.cases[sample.case] for sample in share]
    seeds = [rollouts.env_seed("held-out", sample.row) for sample in share]
    sampling_seeds = [rollouts.sampling_seed("held-out", sample.row, sample.number) for sample in share]
    episodes = rollouts.play(cases, seeds, sampling_seeds, decoding)
    finish_groups(rollouts, episodes, [(sample.case, sample.number) for sample in share])
    return list(zip(share, episodes, strict=True))


def _whole_groups(
    recorded: Mapping[tuple[int, int], float | None], numbers: range
) -> Mapping[tuple[int, int], float | None]:
    """The recorded scores of cases that have all samples: those of a case are scored together."""
    return {key: score for key, score in recorded.items() if all((key[0], number) in recorded for number in numbers)}


def _record(episode: Episode, phase: EvalPhase, sample: EvalSample) -> RolloutRecord:
    """The record of an episode, with the weight version of the evaluation: the engine's is the number of optimizer
    steps done, also if the weights of an earlier step are evaluated."""
    record = episode_record(episode, phase.step, phase.weight_version)
    turns = tuple(replace(turn, weight_version=phase.weight_version) for turn in record.turns)
    prompt = record.rendered_prompt if sample.number == 0 else ""  # the samples of a case have the same one
    return replace(record, eval_phase=phase.name, sample=sample.number, turns=turns, rendered_prompt=prompt)


def _gather_scores(
    rollouts: PolicyRollouts, played: list[tuple[EvalSample, Episode]], failures: list[tuple[str, str]]
) -> list[tuple[str, float]]:
    """(row, score) of all ranks, in the order of the plan; adds environment and kind of the failures of all ranks."""
    results = [(sample, episode.result) for sample, episode in played]
    own = [(one.case, one.number, one.row, result.score) for one, result in results if result.score is not None]
    scores = gather_object(own)
    own_failures = [(one.case.env, one.result.failure.kind) for _, one in played if one.result.failure is not None]
    kinds = gather_object(own_failures)
    if kinds:
        rollouts.report_failures([episode for _, episode in played])
    failures += kinds
    rollouts.check_abandoned(sum(gather_object([rollouts.abandoned_threads])))
    return [(str(row), score) for _, _, row, score in sorted(scores)]


# -- recorded scores of a resumed run


def recorded_before(folder: RunFolder, cases: Sequence[Case]) -> RecordedScores:
    """The recorded scores before training of these cases, the same on every rank; without rows whose prompt has
    changed, or the other columns if there is no prompt."""
    found: list[Any] = [_read_before(folder, cases) if PartialState().is_main_process else None]
    broadcast_object_list(found)
    scores: RecordedScores = found[0]
    return scores


def _read_before(folder: RunFolder, cases: Sequence[Case]) -> RecordedScores:
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


# -- the environments of held-out scores

FEW_CASES = 16
"""With fewer cases, what a verdict can show is said before the training."""


def note_on_few_cases(mixture: Mixture) -> str | None:
    """What a verdict on so few cases can show at best; None for many, and for no case."""
    count = cases_of(mixture)
    if not 0 < count < FEW_CASES:
        return None
    said = f"Different held-out cases: {count}. A verdict needs {FEWEST_CASES} whose score changes"
    end = "so there will be none" if count < FEWEST_CASES else "so small gains will not show"
    return f"{said}, {end}; --eval-cases holds out more."


def mixture_of(runner: Runner, held_out: Sequence[Case], train: Sequence[Case] = ()) -> Mixture:
    """The environments with their held-out cases."""
    shares = runner.config.env_shares
    return tuple(
        ScoredEnv(
            name,
            shares[name],
            bounds_of(part.config.rl_score_range),
            {str(case.number): prompt_key(to_jsonable(case.prompt)) for case in held_out if case.env == name},
            sum(case.env == name for case in train) if name else len(train),
        )
        for name, part in runner.parts.items()
    )
