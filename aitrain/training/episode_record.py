"""Makes the rollout record of an episode."""

from __future__ import annotations

from aitrain.execution.failure import Failure
from aitrain.rollout.episode import Episode
from aitrain.rollout.trajectory import Trajectory
from aitrain.runs.rollout_record import RecordedError, RecordedTurn, RolloutRecord, row_columns


def episode_record(episode: Episode, step: int, weight_version: int) -> RolloutRecord:
    """The rollout record of an episode, without the fields of its batch (group, advantage, evaluation, sample)."""
    trajectory, case, session = episode.trajectory, episode.case, episode.session
    return RolloutRecord(
        step=step,
        weight_version=weight_version,
        environment=case.env,
        row_number=case.number,
        case_idx=case.case_idx,
        row=row_columns(case.row),
        seed=session.seed,
        prompt=case.prompt,
        rendered_prompt=episode.rendered_prompt,
        tools=list(session.reset.tools),
        messages=episode.conversation,
        completion=episode.transcript.text,
        turns=_turns(trajectory),
        tokens=trajectory.sampled_tokens,
        score=episode.result.score,
        metrics=episode.result.metrics,
        stop=episode.stop,
        error=_recorded(episode.result.failure),
        seconds=round(session.seconds, 6),
    )


def _turns(trajectory: Trajectory) -> tuple[RecordedTurn, ...]:
    """Number of sampled tokens in each turn, and the weight version that sampled them."""
    ends = [*trajectory.turn_starts[1:], len(trajectory.ids)]
    return tuple(
        RecordedTurn(sum(trajectory.mask[turn.start : end]), turn.weight_version)
        for turn, end in zip(trajectory.turns, ends, strict=False)
    )


def _recorded(failure: Failure | None) -> RecordedError | None:
    return None if failure is None else RecordedError(failure.kind, failure.place, failure.trace or failure.message)
