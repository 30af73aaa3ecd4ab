"""The episodes of one generation batch in training: their cases and seeds, groups, metrics and records, and which of
them are in the loss. The members of a group may be on several ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aitrain.environment.session import Group
from aitrain.execution.failure import FAILURE_KINDS
from aitrain.rollout.episode import STOPS, Episode
from aitrain.runs.records import RecordedError, RolloutRecord, row_columns
from aitrain.training.policy_rollouts import PolicyRollouts

MemberKey: TypeAlias = tuple[int, int]
"""An episode's group, and its place in the group."""


@dataclass(frozen=True)
class PlayedEpisode:
    """What all ranks know of an episode that one of them has played."""

    key: MemberKey
    env: str
    score: float | None
    failure: tuple[str, str] | None
    """Kind and message."""
    tokens: int
    """Sampled tokens."""
    longest: int
    """Tokens of its longest completion."""
    is_whole: bool
    """Whether the policy ended its last completion."""
    is_kept: bool
    """Whether it is in the loss."""
    dropped: str
    """Why it takes no part; empty if it does."""

    @classmethod
    def of(cls, key: MemberKey, episode: Episode, masks_truncated: bool) -> PlayedEpisode:
        """What is known of an episode that was scored."""
        result, trajectory = episode.result, episode.trajectory
        return cls(
            key,
            episode.case.env,
            result.score,
            None if result.failure is None else (result.failure.kind, episode.failure_message),
            trajectory.sampled_tokens,
            max(trajectory.turn_lengths, default=0),
            trajectory.ended_by_policy,
            result.score is not None and not (masks_truncated and episode.is_truncated),
            f"Case {episode.case.case_idx} is dropped: its prompt has {episode.too_long} tokens"
            if episode.too_long is not None
            else "",
        )


@dataclass
class TrainingBatch:
    """One rank's share of a generation batch, groups side by side."""

    step: int
    """Optimizer steps before the one that trains on it first."""
    keys: list[MemberKey]
    """The episodes that are trained on, in their order."""
    own: dict[MemberKey, Episode]
    """This rank's episodes by key: those that are trained on, and those of replaced groups."""
    rounds: list[int]
    """0 for a group that is one of the batch's first, else the round of replacements that plays it."""
    everywhere: list[PlayedEpisode]
    """The episodes of the batch on all ranks, in the order of the ranks."""
    played: list[PlayedEpisode]
    """The same, and those that were replaced."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the choice of cases, the same on all ranks."""
    weight_version: int = 0
    """Optimizer steps of the weights that the episodes began with."""

    @property
    def episodes(self) -> list[Episode]:
        """The played episodes that are trained on."""
        return [self.own[key] for key in self.keys]

    def length_metrics(self) -> dict[str, float]:
        """TRL's length metrics; TRL's own count dropped episodes, and completions that end with a stop string as
        truncated."""
        played = [one for one in self.everywhere if not one.dropped]
        metrics = {"completions/clipped_ratio": sum(not one.is_whole for one in played) / max(1, len(played))}
        for name, those in (("", played), ("terminated_", [one for one in played if one.is_whole])):
            lengths = [float(one.tokens) for one in those] or [0.0]
            values = {"mean": sum(lengths) / len(lengths), "min": min(lengths), "max": max(lengths)}
            metrics |= {f"completions/{kind}_{name}length": value for kind, value in values.items()}
        return metrics

    def records(self, advantages: Sequence[float]) -> list[RolloutRecord]:
        """The rollout records."""

        def record(key: MemberKey, **fields: Any) -> RolloutRecord:
            group, member = key
            return episode_record(self.own[key], self.step + 1, self.weight_version, member == 0, group=group, **fields)

        trained = [record(key, advantage=advantage) for key, advantage in zip(self.keys, advantages, strict=True)]
        discarded = sorted(self.own.keys() - self.keys)
        return trained + [record(key, discarded=self.rounds[key[0]]) for key in discarded]


def finish(rollouts: PolicyRollouts, own: Mapping[MemberKey, Episode]) -> list[PlayedEpisode]:
    """Score the groups together whose environment does so; returns the episodes of all ranks in the order of their
    keys. Every rank must call this, with its own episodes, which are whole groups in such an environment."""
    runner = rollouts.rollout.runner
    together = defaultdict[int, list[Episode]](list)
    for (number, _), episode in own.items():
        if episode.too_long is None and runner.part_of(episode.case).scores_groups:
            together[number].append(episode)
    with rollouts.rollout.engine.clock.running("environment"):
        for members in together.values():  # one after another: a call may compare with what earlier ones left
            case = members[0].case
            played_group = Group(case, [one.as_member for one in members])
            results = rollouts.loop.run(runner.part_of(case).score_group(played_group))
            for episode, result in zip(members, results, strict=True):
                episode.result = result
    masks_truncated = runner.config.rl_mask_truncated_completions
    played = [PlayedEpisode.of(key, episode, masks_truncated) for key, episode in own.items()]
    return sorted(rollouts.gather(played), key=lambda one: one.key)


def episode_metrics(episode: Episode) -> dict[str, float]:
    """Values of one episode, of which the batch logs the mean: metrics, turns, thoughts, tool calls, how it ended.
    A dropped episode counts in the share of dropped ones only."""
    if episode.too_long is not None:
        return {"stopped/no_room": 1.0}
    kind = episode.result.failure.kind if episode.result.failure else None
    env, score = episode.case.env, episode.result.score
    own = f"env/{env}/" if env else "env/"
    trajectory, thoughts = episode.trajectory, dict[str, float]()
    if trajectory.thoughts:
        thought, is_cut = sum(trajectory.thoughts), trajectory.thoughts[-1] == trajectory.turn_lengths[-1]
        thoughts = {"thinking/tokens": float(thought), "thinking/answer_tokens": trajectory.sampled_tokens - thought}
        thoughts |= {"thinking/without_answer": float(is_cut)}
    return {
        **thoughts,
        "unscored": float(episode.result.score is None),
        "turns": float(len(trajectory.turns)),
        "tools/calls": float(episode.tool_calls),
        "tools/wrong_calls": float(episode.wrong_tool_calls),
        **({"tools/unused": float(not episode.tool_calls)} if episode.reset.runs_tools else {}),
        **{f"{own}{name}": value for name, value in episode.result.metrics.items()},
        **({f"{own}score": score} if env and score is not None else {}),
        **{f"failed/{one}": float(kind == one) for one in FAILURE_KINDS},
        **{f"stopped/{stop}": float(episode.stop == stop) for stop in STOPS},
    }


def episode_record(
    episode: Episode, step: int, weight_version: int, is_first: bool = True, **of_batch: Any
) -> RolloutRecord:
    """The rollout record of an episode, with the fields of its batch (group, advantage, evaluation, sample). Only the
    first one of a group or case has the rendered prompt, which is the same for all."""
    trajectory, case, failure = episode.trajectory, episode.case, episode.result.failure
    return RolloutRecord(
        step=step,
        weight_version=weight_version,
        environment=case.env,
        row_number=case.number,
        case_idx=case.case_idx,
        row=row_columns(case.row),
        seed=episode.seed,
        prompt=case.prompt,
        rendered_prompt=episode.rendered_prompt if is_first and episode.is_chat else "",
        tools=list(episode.reset.tools),
        messages=episode.conversation,
        completion=episode.transcript.text,
        turns=[{"tokens": tokens} for tokens in trajectory.turn_lengths],
        tokens=trajectory.sampled_tokens,
        score=episode.result.score,
        metrics=episode.result.metrics,
        stop=episode.stop,
        error=None if failure is None else RecordedError(failure.kind, failure.place, failure.trace or failure.message),
        seconds=round(episode.seconds, 6),
        **of_batch,
    )
