"""Scores the episodes of a group together: `score_group` of an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aitrain import activity
from aitrain.environment.contract import arguments_for, copy_arguments
from aitrain.environment.mixed_runner import Runner
from aitrain.environment.runner import REPEATABLE, EnvRunner
from aitrain.environment.score_parsing import Bounds, ScoreResult, parse_score, shown
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import Group, within
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.deadline_thread import GRACE
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import ProcessPool
from aitrain.execution.task import Outcome

PLACE = "score_group"


@dataclass(frozen=True)
class GroupScorer:
    """Scores groups in the process of the environment."""

    bounds: Bounds
    environment: Any

    def score(self, group: Group) -> list[ScoreResult]:
        """The result of each member: the score of `score_group`, with the metrics of both; an episode that failed keeps
        its failure."""
        method = self.environment.score_group
        with within(PLACE):
            returned = run_if_async(method(**copy_arguments(arguments_for(method, group.arguments()))))
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)) or len(returned) != len(group.members):
            count = f"{len(returned)} scores" if isinstance(returned, (list, tuple)) else shown(returned)
            message = (
                f"returned {count}: return a list with one score, or None, for each of {len(group.members)} episodes"
            )
            raise CallFailed(Failure("wrong_type", message, place=PLACE))
        return [
            _merged(member.result, parse_score(value, self.bounds))
            for member, value in zip(group.members, returned, strict=True)
        ]


def _merged(own: ScoreResult, result: ScoreResult) -> ScoreResult:
    if own.failure is not None:
        return own
    failure = None if result.failure is None else replace(result.failure, place=PLACE)
    return ScoreResult(result.score, {**own.metrics, **result.metrics}, failure)


async def score_groups(runner: Runner, groups: Sequence[Group]) -> list[list[ScoreResult]]:
    """The results of each group, one call after another, as they may compare with what earlier ones left on the
    environment. If the call fails, all of its members have the failure."""
    return [await _score_group(runner.part_of(group.case), group) for group in groups]


async def _score_group(runner: EnvRunner, group: Group) -> list[ScoreResult]:
    job = group_job(runner, group, runner.config.score_bounds)
    outcome: Outcome[list[ScoreResult]] = Outcome()
    for _ in range(1 + (runner.config.rl_env_retries or 0)):
        with activity.own.waiting("waiting for the environment", runner.pool.timeout + GRACE):
            outcome = await runner.pool.call(job)
        if outcome.value is not None:
            return outcome.value
        if outcome.failure is not None and outcome.failure.kind not in REPEATABLE:
            break
    assert outcome.failure is not None
    failure = replace(outcome.failure, place=outcome.failure.place or PLACE)
    return [_merged(member.result, ScoreResult(None, failure=failure)) for member in group.members]


def group_job(runner: EnvRunner, group: Group, bounds: Bounds) -> Callable[[], list[ScoreResult]]:
    """The call that scores a group, where the environment is."""
    if isinstance(runner.environment, ServedEnvironment):
        return partial(runner.environment.score, group, bounds)
    if runner.processes is not None:
        return partial(_score_in_process, runner.processes, group, bounds)
    return partial(GroupScorer(bounds, runner.environment).score, group)


def _score_in_process(processes: ProcessPool, group: Group, bounds: Bounds) -> list[ScoreResult]:
    lease = processes.lease(partial(GroupScorer, bounds))
    try:
        results: list[ScoreResult] = lease.call("score", group)
        return results
    finally:
        lease.release()
