"""The metrics of an episode, of which the trainer logs the mean over a batch."""

from __future__ import annotations

from aitrain.execution.failure import FAILURE_KINDS
from aitrain.rollout.episode import STOPS, Episode


def length_metrics(episodes: list[tuple[int, bool]]) -> dict[str, float]:
    """TRL's length metrics of a batch, given (length, is truncated) of each episode."""
    lengths = [length for length, _ in episodes] or [0]
    ended = [length for length, is_truncated in episodes if not is_truncated] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(is_truncated for _, is_truncated in episodes) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def episode_metrics(episode: Episode) -> dict[str, float]:
    """Values of one episode, of which the batch logs the mean: environment metrics, turns, tool calls, how it ended.
    A dropped episode counts in the share of dropped ones only."""
    if episode.is_dropped:
        return {"stopped/no_room": 1.0}
    kind = episode.result.failure.kind if episode.result.failure else None
    env, score = episode.case.env, episode.result.score
    own = f"env/{env}/" if env else "env/"
    return {
        "unscored": float(episode.result.score is None),
        "turns": float(len(episode.trajectory.turns)),
        "tools/calls": float(episode.tool_calls),
        "tools/wrong_calls": float(episode.wrong_tool_calls),
        **{f"{own}{name}": value for name, value in episode.result.metrics.items()},
        **({f"{own}score": score} if env and score is not None else {}),
        **{f"failed/{one}": float(kind == one) for one in FAILURE_KINDS},
        **{f"stopped/{stop}": float(episode.stop == stop) for stop in STOPS},
    }
