"""The episodes of one generation batch in training: their cases and seeds, and which of them are in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accelerate.utils import gather_object

from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.episode_groups import MemberKey, finish_groups
from aitrain.training.episode_metrics import length_metrics
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts


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
