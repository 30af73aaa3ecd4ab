"""The episodes of one generation batch in training: their cases and seeds, and which of them are in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accelerate.utils import gather_object

from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.training.episode_groups import finish_groups
from aitrain.training.episode_metrics import length_metrics
from aitrain.training.episode_record import episode_record
from aitrain.training.policy_rollouts import PolicyRollouts


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
    weight_version: int = 0
    """Optimizer steps of the weights that the episodes began with."""
    dropped: int = 0
    """Episodes on all ranks whose prompt leaves no room for an answer."""
    index: int = 0
    """Number of the batch, counted from the beginning of the run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of its rollout, if that was played while another batch was trained on."""

    def play(self, rollouts: PolicyRollouts) -> None:
        """Play the episodes. Those of a group have consecutive sampling seeds, and one environment seed."""
        seeds = [rollouts.env_seed(self.step, number) for number in self.numbers]
        groups = [divmod(place, self.group_size) for place in self.places]
        sampling_seeds = [
            rollouts.sampling_seed(self.step, number, group) + member
            for number, (group, member) in zip(self.numbers, groups, strict=True)
        ]
        self.weight_version = rollouts.weight_version()
        self.episodes = rollouts.play(self.cases, seeds, sampling_seeds)
        keys = [(place // self.group_size, place) for place in self.places]
        self.dropped = len(finish_groups(rollouts, self.episodes, keys))

    def scores(self) -> list[float]:
        """The score of each episode, NaN for none."""
        scores = (episode.result.score for episode in self.episodes)
        return [math.nan if score is None else score for score in scores]

    def kept(self, masks_truncated: bool) -> list[bool]:
        """Which episodes are in the loss."""
        return [
            episode.result.score is not None and not (masks_truncated and episode.is_truncated)
            for episode in self.episodes
        ]

    def length_metrics(self) -> dict[str, float]:
        """TRL's length metrics over all ranks; TRL's own count dropped episodes, and completions that end with a stop
        string as truncated."""
        played = [episode for episode in self.episodes if not episode.is_dropped]
        own = [(e.trajectory.sampled_tokens, not e.trajectory.ended_by_policy) for e in played]
        return length_metrics(gather_object(own))

    def records(self, advantages: Sequence[float]) -> list[RolloutRecord]:
        """The rollout records; the first one of each group has the rendered prompt."""
        made = [episode_record(episode, self.step + 1, self.weight_version) for episode in self.episodes]
        groups = [divmod(place, self.group_size) for place in self.places]
        return [
            replace(
                record,
                group=group,
                advantage=advantage,
                rendered_prompt=record.rendered_prompt if member == 0 else "",
            )
            for record, (group, member), advantage in zip(made, groups, advantages, strict=True)
        ]
