"""What concerns a whole group of episodes, whose members may be on several ranks: dropped cases, and `score_group`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aitrain.environment.episode_group import Group, GroupMember
from aitrain.environment.group_scoring import score_groups
from aitrain.environment.score_parsing import ScoreResult
from aitrain.rollout.episode import Episode
from aitrain.training.policy_rollouts import PolicyRollouts

MemberKey: TypeAlias = tuple[int, int]
"""An episode's group, and its place in the group."""


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
