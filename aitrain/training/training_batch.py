"""The episodes of one generation batch in training: their cases and seeds, groups, metrics, and which of them are in
the loss. The members of a group may be on several ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from accelerate.utils import gather_object

from aitrain.environment.contract import Case, ScoreResult
from aitrain.environment.runner import score_groups
from aitrain.environment.session import Group, GroupMember
from aitrain.execution.failure import FAILURE_KINDS
from aitrain.rollout.episode import STOPS, Episode
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts

MemberKey: TypeAlias = tuple[int, int]
"""An episode's group, and its place in the group."""


@dataclass(frozen=True)
class DiscardedEpisode:
    """An episode that was played and is not trained on, as its group has no advantages."""

    episode: Episode
    key: MemberKey
    round: int
    """0 if its group was one of the batch's first, else the round of replacements that played it."""


@dataclass
class TrainingBatch:
    """One rank's share of a generation batch, groups side by side."""

    step: int
    """Optimizer steps before the one that trains on it first."""
    places: range
    """Indices of this rank's episodes among all episodes of the step."""
    group_size: int
    numbers: list[int]
    """The row number of each episode's case."""
    cases: list[Case]
    episodes: list[Episode] = field(default_factory=list)
    keys: list[MemberKey] = field(default_factory=list)
    """The group of each episode within its step, and its place in the group."""
    dropped: int = 0
    """Episodes on all ranks whose prompt leaves no room for an answer."""
    discarded: list[DiscardedEpisode] = field(default_factory=list)
    """Episodes that this rank played and that are not trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the choice of cases, the same on all ranks."""
    weight_version: int = 0
    """Optimizer steps of the weights that the episodes began with."""
    index: int = 0
    """Number of the batch, counted from the beginning of the run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of its rollout, if that was played while another batch was trained on."""

    def __post_init__(self) -> None:
        self.keys = self.keys or [divmod(place, self.group_size) for place in self.places]

    def play(self, rollouts: PolicyRollouts) -> None:
        """Play the episodes. Those of a group have consecutive sampling seeds, and one environment seed."""
        members = list(zip(self.keys, self.numbers, strict=True))
        self.weight_version = rollouts.weight_version()
        self.episodes = play_members(rollouts, self.step, members, self.cases)
        self.dropped = len(finish_groups(rollouts, self.episodes, self.keys))

    @property
    def played(self) -> list[Episode]:
        """All episodes that this rank has played: those of the batch, and the discarded ones."""
        return [*self.episodes, *(one.episode for one in self.discarded)]

    def scores(self) -> list[float]:
        """The score of each episode, NaN for none."""
        scores = (episode.result.score for episode in self.episodes)
        return [math.nan if score is None else score for score in scores]

    def kept(self, masks_truncated: bool) -> list[bool]:
        """Which episodes are in the loss."""
        return [is_kept(episode, masks_truncated) for episode in self.episodes]

    def length_metrics(self) -> dict[str, float]:
        """TRL's length metrics over all ranks; TRL's own count dropped episodes, and completions that end with a stop
        string as truncated."""
        played = [episode for episode in self.episodes if not episode.is_dropped]
        own = [(e.trajectory.sampled_tokens, not e.trajectory.ended_by_policy) for e in played]
        return length_metrics(gather_object(own))

    def records(self, advantages: Sequence[float]) -> list[RolloutRecord]:
        """The rollout records; the first one of each group has the rendered prompt."""
        trained = [
            replace(self._record(episode, key), advantage=advantage)
            for episode, key, advantage in zip(self.episodes, self.keys, advantages, strict=True)
        ]
        return trained + [replace(self._record(one.episode, one.key), discarded=one.round) for one in self.discarded]

    def _record(self, episode: Episode, key: MemberKey) -> RolloutRecord:
        record, (group, member) = episode_record(episode, self.step + 1, self.weight_version), key
        return replace(record, group=group, rendered_prompt=record.rendered_prompt if member == 0 else "")


def is_kept(episode: Episode, masks_truncated: bool) -> bool:
    """Whether an episode is in the loss."""
    return episode.result.score is not None and not (masks_truncated and episode.is_truncated)


def play_members(
    rollouts: PolicyRollouts, step: int, members: Sequence[tuple[MemberKey, int]], cases: Sequence[Case]
) -> list[Episode]:
    """This rank's episodes, given the key and the case number of each; without what concerns whole groups."""
    seeds = [rollouts.env_seed(step, number) for _, number in members]
    sampling_seeds = [rollouts.sampling_seed(step, number, group) + member for (group, member), number in members]
    return rollouts.play(cases, seeds, sampling_seeds)


# -- whole groups


@dataclass(frozen=True)
class DroppedCase:
    """A case whose prompt leaves no room for an answer."""

    group: int
    case_idx: object
    tokens: int


def finish_groups(
    rollouts: PolicyRollouts, episodes: Sequence[Episode], keys: Sequence[MemberKey]
) -> list[DroppedCase]:
    """Drop the groups with a prompt that leaves no room, and score the others together if the environment does so.
    Returns what was dropped on all ranks. Every rank must call this, with its own episodes."""
    found = [
        DroppedCase(group, episode.case.case_idx, episode.too_long)
        for episode, (group, _) in zip(episodes, keys, strict=True)
        if episode.too_long is not None
    ]
    dropped: list[DroppedCase] = rollouts.gather(found)
    groups = {one.group for one in dropped}
    for episode, (group, _) in zip(episodes, keys, strict=True):
        if group in groups:
            episode.is_dropped, episode.result = True, ScoreResult(None)
    if dropped:
        rollouts.note_dropped(dropped[0].case_idx, dropped[0].tokens)
    runner = rollouts.rollout.runner
    if runner.scores_groups:
        pairs = zip(keys, episodes, strict=True)
        _score_groups(
            rollouts,
            {key: one for key, one in pairs if not one.is_dropped and runner.part_of(one.case).scores_groups},
        )
    return dropped


def _score_groups(rollouts: PolicyRollouts, episodes: dict[MemberKey, Episode]) -> None:
    """Each group is scored by the rank that has its first member."""
    own = [(key, _member(episode)) for key, episode in episodes.items()]
    members: dict[int, dict[MemberKey, GroupMember]] = defaultdict(dict)
    for key, member in sorted(rollouts.gather(own), key=lambda pair: pair[0]):
        members[key[0]][key] = member
    ours = [group for group in members.values() if next(iter(group)) in episodes]
    rollout = rollouts.rollout
    with rollout.clock.running("rollout"), rollout.clock.running("environment"):
        scored = rollouts.loop.run(
            score_groups(rollout.runner, [Group(episodes[next(iter(group))].case, [*group.values()]) for group in ours])
        )
    results = [pair for group, row in zip(ours, scored, strict=True) for pair in zip(group, row, strict=True)]
    for key, result in rollouts.gather(results):
        if key in episodes:
            episodes[key].result = result


def _member(episode: Episode) -> GroupMember:
    transcript = episode.transcript
    return GroupMember(transcript.content, transcript.text, episode.conversation, episode.result)


# -- metrics


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
