"""The episodes of one generation batch in training: their cases and seeds, groups, metrics and records, and which of
them are in the loss. The members of a group may be on several ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from aitrain.environment.contract import ScoreResult
from aitrain.environment.runner import score_groups
from aitrain.environment.session import Group, GroupMember
from aitrain.execution.failure import FAILURE_KINDS
from aitrain.rollout.episode import STOPS, Episode
from aitrain.runs.records import RecordedError, RecordedTurn, RolloutRecord, row_columns
from aitrain.training.policy_rollouts import PolicyRollouts

MemberKey: TypeAlias = tuple[int, int]
"""An episode's group, and its place in the group."""


@dataclass(frozen=True)
class PlayedEpisode:
    """What all ranks know of an episode that one of them has played."""

    key: MemberKey
    number: int
    """Of its case."""
    env: str
    score: float | None
    failure: tuple[str, str] | None
    """Kind and message."""
    tokens: int
    """Sampled tokens."""
    is_whole: bool
    """Whether the policy ended its last completion."""
    is_truncated: bool
    is_dropped: bool

    @classmethod
    def of(cls, planned: PlannedEpisode) -> PlayedEpisode:
        """What is known of an episode that was scored."""
        episode = planned.episode
        result, trajectory = episode.result, episode.trajectory
        return cls(
            planned.key,
            planned.number,
            episode.case.env,
            result.score,
            None if result.failure is None else (result.failure.kind, episode.failure_message),
            trajectory.sampled_tokens,
            trajectory.ended_by_policy,
            episode.is_truncated,
            episode.is_dropped,
        )

    def is_kept(self, masks_truncated: bool) -> bool:
        """Whether it is in the loss."""
        return self.score is not None and not (masks_truncated and self.is_truncated)


@dataclass
class PlannedEpisode:
    """An episode that this rank plays, in training or in an evaluation."""

    key: MemberKey
    number: int
    """Of its case."""
    round: int = 0
    """0 if its group is one of the batch's first, else the round of replacements that plays it."""
    episode: Episode = field(init=False)
    """Set when it was played."""


@dataclass
class TrainingBatch:
    """One rank's share of a generation batch, groups side by side."""

    step: int
    """Optimizer steps before the one that trains on it first."""
    planned: list[PlannedEpisode]
    """Those that are trained on."""
    everywhere: list[PlayedEpisode] = field(default_factory=list)
    """The episodes of the batch on all ranks, in the order of the ranks."""
    played: list[PlayedEpisode] = field(default_factory=list)
    """The same, and those that were replaced."""
    discarded: list[PlannedEpisode] = field(default_factory=list)
    """Episodes that this rank played and that are not trained on, as their groups have no advantages."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the choice of cases, the same on all ranks."""
    weight_version: int = 0
    """Optimizer steps of the weights that the episodes began with."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of its rollout, if that was played while another batch was trained on."""

    @property
    def episodes(self) -> list[Episode]:
        """The played episodes that are trained on."""
        return [one.episode for one in self.planned]

    def length_metrics(self) -> dict[str, float]:
        """TRL's length metrics; TRL's own count dropped episodes, and completions that end with a stop string as
        truncated."""
        played = [one for one in self.everywhere if not one.is_dropped]
        metrics = {"completions/clipped_ratio": sum(not one.is_whole for one in played) / max(1, len(played))}
        for name, those in (("", played), ("terminated_", [one for one in played if one.is_whole])):
            lengths = [float(one.tokens) for one in those] or [0.0]
            values = {"mean": sum(lengths) / len(lengths), "min": min(lengths), "max": max(lengths)}
            metrics |= {f"completions/{kind}_{name}length": value for kind, value in values.items()}
        return metrics

    def records(self, advantages: Sequence[float]) -> list[RolloutRecord]:
        """The rollout records; the first one of each group has the rendered prompt."""
        trained = [
            replace(self._record(one), advantage=advantage)
            for one, advantage in zip(self.planned, advantages, strict=True)
        ]
        return trained + [replace(self._record(one), discarded=one.round) for one in self.discarded]

    def _record(self, one: PlannedEpisode) -> RolloutRecord:
        record, (group, member) = episode_record(one.episode, self.step + 1, self.weight_version), one.key
        return replace(record, group=group, rendered_prompt=record.rendered_prompt if member == 0 else "")


def finish(rollouts: PolicyRollouts, planned: Sequence[PlannedEpisode]) -> list[PlayedEpisode]:
    """Drop the groups with a prompt that leaves no room, and score the others together if the environment does so;
    returns the episodes of all ranks in the order of their keys. Every rank must call this, with its own episodes."""
    _finish_groups(rollouts, {one.key: one.episode for one in planned})
    return sorted(rollouts.gather(list(map(PlayedEpisode.of, planned))), key=lambda one: one.key)


def _finish_groups(rollouts: PolicyRollouts, of_keys: Mapping[MemberKey, Episode]) -> None:
    own = [(group, one.case.case_idx, one.too_long) for (group, _), one in of_keys.items() if one.too_long is not None]
    too_long = rollouts.gather(own)
    groups = {group for group, _, _ in too_long}
    for (group, _), episode in of_keys.items():
        if group in groups:
            episode.is_dropped, episode.result = True, ScoreResult(None)
    if too_long:
        _, case_idx, tokens = too_long[0]
        rollouts.note_dropped(case_idx, tokens)
    runner, clock = rollouts.rollout.runner, rollouts.rollout.clock
    if not runner.scores_groups:
        return
    together = {
        key: one.as_member
        for key, one in of_keys.items()
        if not one.is_dropped and runner.part_of(one.case).scores_groups
    }
    members: dict[int, dict[MemberKey, GroupMember]] = defaultdict(dict)
    for key, member in sorted(rollouts.gather(list(together.items())), key=lambda pair: pair[0]):
        members[key[0]][key] = member
    ours = [group for group in members.values() if next(iter(group)) in together]  # of the rank with the first member
    to_score = [Group(of_keys[next(iter(group))].case, list(group.values())) for group in ours]
    with clock.running("rollout"), clock.running("environment"):
        scored = rollouts.loop.run(score_groups(runner, to_score))
    results = [pair for group, row in zip(ours, scored, strict=True) for pair in zip(group, row, strict=True)]
    for key, result in rollouts.gather(results):
        if key in together:
            of_keys[key].result = result


def episode_metrics(episode: Episode) -> dict[str, float]:
    """Values of one episode, of which the batch logs the mean: metrics, turns, thoughts, tool calls, how it ended.
    A dropped episode counts in the share of dropped ones only."""
    if episode.is_dropped:
        return {"stopped/no_room": 1.0}
    kind = episode.result.failure.kind if episode.result.failure else None
    env, score = episode.case.env, episode.result.score
    own = f"env/{env}/" if env else "env/"
    trajectory, thoughts = episode.trajectory, dict[str, float]()
    if episode.thought_tokens:
        thought, is_cut = sum(episode.thought_tokens), episode.thought_tokens[-1] == trajectory.turn_lengths[-1]
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


def episode_record(episode: Episode, step: int, weight_version: int) -> RolloutRecord:
    """The rollout record of an episode, without the fields of its batch (group, advantage, evaluation, sample)."""
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
        rendered_prompt=episode.rendered_prompt if episode.is_chat else "",
        tools=list(episode.reset.tools),
        messages=episode.conversation,
        completion=episode.transcript.text,
        turns=tuple(map(RecordedTurn, trajectory.turn_lengths)),
        tokens=trajectory.sampled_tokens,
        score=episode.result.score,
        metrics=episode.result.metrics,
        stop=episode.stop,
        error=None if failure is None else RecordedError(failure.kind, failure.place, failure.trace or failure.message),
        seconds=round(episode.seconds, 6),
    )
