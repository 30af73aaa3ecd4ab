"""Makes the rollout record of an episode."""

from __future__ import annotations

from aitrain.rollout.episode import Episode
from aitrain.runs.rollout_record import RecordedError, RecordedTurn, RolloutRecord, row_columns


def episode_record(episode: Episode, step: int, weight_version: int) -> RolloutRecord:
    """The rollout record of an episode, without the fields of its batch (group, advantage, evaluation, sample)."""
    trajectory, case, session, failure = episode.trajectory, episode.case, episode.session, episode.result.failure
    return RolloutRecord(
        step=step,
        weight_version=weight_version,
        environment=case.env,
        row_number=case.number,
        case_idx=case.case_idx,
        row=row_columns(case.row),
        seed=session.seed,
        prompt=case.prompt,
        rendered_prompt=episode.rendered[0] if episode.rendered and episode.is_chat else "",
        tools=list(session.reset.tools),
        messages=episode.conversation,
        completion=episode.transcript.text,
        turns=tuple(
            RecordedTurn(tokens, turn.weight_version)
            for tokens, turn in zip(trajectory.turn_lengths, trajectory.turns, strict=True)
        ),
        tokens=trajectory.sampled_tokens,
        score=episode.result.score,
        metrics=episode.result.metrics,
        stop=episode.stop,
        error=None if failure is None else RecordedError(failure.kind, failure.place, failure.trace or failure.message),
        seconds=round(session.seconds, 6),
    )
