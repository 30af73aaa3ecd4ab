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
    keys: list[MemberKey]
    """The group of each episode within its step, and its place in the group."""
    numbers: list[int]
    """The row number of each episode's case."""
    cases: list[Case]
    episodes: list[Episode] = field(default_factory=list)
    dropped: int = 0
    """Episodes on all ranks whose prompt leaves no room for an answer."""
    discarded: list[DiscardedEpisode] = field(default_factory=list)
    """Episodes that this rank played and that are not trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the choice of cases, the same on all ranks."""
    weight_version: int = 0
    """Optimizer steps of the weights that the episodes began with."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of its rollout, if that was played while another batch was trained on."""

    def play(self, rollouts: PolicyRollouts, places: Sequence[int]) -> int:
        """Play the episodes at these places, also once more if their cases have changed; returns how many on all ranks
        have a prompt that leaves no room. Those of a group have consecutive sampling seeds, and one environment seed.
        """
        self.weight_version = rollouts.weight_version()
        most = max(rollouts.gather([len(places)]))  # all ranks play as many times, as they may generate together
        at_once = (rollouts.rollout.runner.episodes_at_once if self.episodes else None) or most
        for start in range(0, most, at_once):
            part, env_seeds, sampling_seeds = places[start : start + at_once], [], []
            for place in part:
                number, (group, member) = self.numbers[place], self.keys[place]
                env_seeds.append(rollouts.env_seed(self.step, number))
                sampling_seeds.append(rollouts.sampling_seed(self.step, number, group) + member)
            played = rollouts.play([self.cases[place] for place in part], env_seeds, sampling_seeds)
            for place, episode in zip(part, played, strict=True):
                self.episodes[place : place + 1] = [episode]
        return finish_groups(
            rollouts, [self.episodes[place] for place in places], [self.keys[place] for place in places]
        )

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
        played = [episode.trajectory for episode in self.episodes if not episode.is_dropped]
        everywhere = gather_object([(one.sampled_tokens, one.ended_by_policy) for one in played])
        lengths = [length for length, _ in everywhere] or [0]
        ended = [length for length, is_whole in everywhere if is_whole] or [0]
        truncated = sum(not is_whole for _, is_whole in everywhere)
        return {
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/min_length": float(min(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/clipped_ratio": truncated / len(lengths),
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "completions/min_terminated_length": float(min(ended)),
            "completions/max_terminated_length": float(max(ended)),
        }

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


def finish_groups(rollouts: PolicyRollouts, episodes: Sequence[Episode], keys: Sequence[MemberKey]) -> int:
    """Drop the groups with a prompt that leaves no room, and score the others together if the environment does so.
    Returns how many episodes have such a prompt, on all ranks. Every rank must call this, with its own episodes."""
    of_keys = dict(zip(keys, episodes, strict=True))
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
        return len(too_long)
    together = {
        key: GroupMember(one.transcript.content, one.transcript.text, one.conversation, one.result)
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
    return len(too_long)


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
        **({"tools/unused": float(not episode.tool_calls)} if episode.session.reset.runs_tools else {}),
        **{f"{own}{name}": value for name, value in episode.result.metrics.items()},
        **({f"{own}score": score} if env and score is not None else {}),
        **{f"failed/{one}": float(kind == one) for one in FAILURE_KINDS},
        **{f"stopped/{stop}": float(episode.stop == stop) for stop in STOPS},
    }
