"""An episode as the record that is written to the run folder."""

from __future__ import annotations

from aitrain.environment.failures import Failure
from aitrain.runs.rollout_record import RecordedError, RecordedTurn, RolloutRecord, row_columns
from aitrain.training.rollout import Episode, Track


def episode_record(episode: Episode, step: int, weight_version: int) -> RolloutRecord:
    """The episode as a rollout record, less what only the batch knows (group, advantage, scoring, sample)."""
    track, case, play = episode.track, episode.case, episode.track.play
    asked = [{"role": "user", "content": case.prompt}] if isinstance(case.prompt, str) else case.prompt
    return RolloutRecord(
        step=step,
        weight_version=weight_version,
        row_number=case.number,
        case_idx=case.case_idx,
        row=row_columns(case.row),
        seed=play.seed,
        prompt=case.prompt,
        tools=list(play.opening.tools),
        messages=[*asked, *track.opening, *track.messages],
        completion=track.completion.text,
        turns=tuple(RecordedTurn(tokens, weight_version) for tokens in _turn_tokens(track)),
        tokens=sum(track.mask),
        score=episode.scored.score,
        metrics=episode.scored.metrics,
        stop=episode.stop,
        error=_recorded(episode.scored.failure),
        seconds=round(play.seconds, 6),
    )


def _turn_tokens(track: Track) -> list[int]:
    """How many tokens the model sampled in each turn."""
    ends = [*track.answers[1:], len(track.ids)]
    return [sum(track.mask[start:end]) for start, end in zip(track.answers, ends, strict=False)]


def _recorded(failure: Failure | None) -> RecordedError | None:
    return None if failure is None else RecordedError(failure.kind, failure.place, failure.trace or failure.message)
