"""What follows the first episodes of a generation batch: the order of cases sees the results, and with
`--rl-sampling refill` groups of other cases replace those without advantages.

Replacing groups are played by all ranks in equal parts. An episode then moves to the rank that trains on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

import torch

from aitrain.environment.contract import Case
from aitrain.rollout.episode import Episode
from aitrain.training.case_order import CaseOrder, PlayedGroup, RefillingOrder
from aitrain.training.episode_groups import MemberKey, finish_groups
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import DiscardedEpisode, TrainingBatch, is_kept, play_members
from aitrain.training.zero_variance import has_advantages

Played: TypeAlias = tuple[MemberKey, int, Episode]
"""The key of an episode, the number of its case, and the episode."""


@dataclass(frozen=True)
class _Group:
    """A group that was played, as all ranks know it."""

    case: int
    scores: list[float]
    has_advantages: bool
    tokens: int
    dropped: int
    round: int
    """0 for the batch's first groups."""


@dataclass(frozen=True)
class Refill:
    """Where replacing groups come from, and how often there may be some in a batch."""

    order: RefillingOrder
    limit: int
    groups_per_step: int
    """Groups that one step begins with; those that replace others are numbered after them."""


@dataclass(frozen=True)
class BatchCompletion:
    """Completes the generation batches of a run after their first episodes."""

    cases: Sequence[Case]
    order: CaseOrder
    masks_truncated: bool
    """Whether truncated episodes are left out of the loss."""
    refill: Refill | None = None

    def complete(self, batch: TrainingBatch, rollouts: PolicyRollouts) -> None:
        """Replace groups of a played batch, and let the order see all that were played. Every rank must call this."""
        if self.refill is None and not self.order.learns:
            return
        groups = _BatchGroups(self, batch, rollouts)
        if self.refill is not None:
            groups.fill(self.refill)
        self.order.see([PlayedGroup(group.case, tuple(group.scores)) for group in groups.table.values()])
        batch.metrics |= self.order.metrics()


@dataclass
class _BatchGroups:
    """The groups that were played for one batch."""

    settings: BatchCompletion
    batch: TrainingBatch
    rollouts: PolicyRollouts
    table: dict[int, _Group] = field(default_factory=dict)
    """All groups of all ranks, by their numbers."""
    own: dict[MemberKey, Episode] = field(default_factory=dict)
    """The episodes of replacing groups that this rank has played."""
    places: dict[int, int] = field(default_factory=dict)
    """The first groups, and the group that is now in the place of each."""

    def __post_init__(self) -> None:
        batch = self.batch
        self._enter(list(zip(batch.keys, batch.numbers, batch.episodes, strict=True)), 0)
        self.places = {group: group for group in self.table}

    def fill(self, refill: Refill) -> None:
        """Replace groups until all have advantages."""
        free, rounds = refill.groups_per_step + min(self.table) * refill.limit, 0
        while rounds < refill.limit:
            flat = [first for first, group in self.places.items() if not self.table[group].has_advantages]
            replaced = [self.table[self.places[first]].case for first in flat]
            others = refill.order.others(replaced, {group.case for group in self.table.values()}) if flat else []
            found = [(first, case) for first, case in zip(flat, others, strict=False) if case is not None]
            if not found:
                break
            rounds += 1
            groups, free = range(free, free + len(found)), free + len(found)
            played = self._play([(group, case) for group, (_, case) in zip(groups, found, strict=True)])
            self.own |= {key: episode for key, _, episode in played}
            self._enter(played, rounds)
            self.places |= {first: group for group, (first, _) in zip(groups, found, strict=True)}
        if rounds:
            self._replace()
        self.batch.metrics = self._metrics(rounds)

    def _play(self, groups: list[tuple[int, int]]) -> list[Played]:
        """This rank's part of the episodes of groups, given their numbers and cases. All ranks play as many times, as
        they may generate together."""
        rollouts, size, cases = self.rollouts, self.batch.group_size, self.settings.cases
        members = [((group, member), number) for group, number in groups for member in range(size)]
        share = math.ceil(len(members) / rollouts.accelerator.num_processes)
        own = members[rollouts.accelerator.process_index * share :][:share]
        runner = rollouts.rollout.runner
        at_once = runner.episodes_at_once or share
        episodes: list[Episode] = []
        for start in range(0, share, at_once):
            part = own[start : start + at_once]
            episodes += play_members(rollouts, self.batch.step, part, [cases[number] for _, number in part])
        finish_groups(rollouts, episodes, [key for key, _ in own])
        return [(key, number, episode) for (key, number), episode in zip(own, episodes, strict=True)]

    def _enter(self, played: list[Played], round: int) -> None:
        """Enter the groups of played episodes into the table, on all ranks."""
        own = [
            (key, number, one.result.score, is_kept(one, self.settings.masks_truncated), one.trajectory.sampled_tokens,
             one.is_dropped)
            for key, number, one in played
        ]  # fmt: skip
        for group, rows in groupby(sorted(self.rollouts.gather(own)), key=lambda row: row[0][0]):
            _, numbers, scores, kept, tokens, dropped = zip(*rows, strict=True)
            tensor = torch.tensor([math.nan if score is None else score for score in scores])
            teaches = bool(has_advantages(tensor, torch.tensor(kept), len(kept)))
            known = [score for score in scores if score is not None]
            self.table[group] = _Group(numbers[0], known, teaches, sum(tokens), sum(dropped), round)

    def _replace(self) -> None:
        """Put the episodes of replacing groups into the batch, on the rank that trains on them."""
        batch, table = self.batch, self.table
        firsts = {group: first for first, group in self.places.items()}
        here = {key: place for place, key in enumerate(batch.keys)}
        first_ones = zip(batch.keys, batch.episodes, strict=True)
        batch.discarded = [
            DiscardedEpisode(episode, key, table[key[0]].round)
            for key, episode in (*first_ones, *self.own.items())
            if key[0] not in firsts
        ]
        staying = {key: episode for key, episode in self.own.items() if key[0] in firsts}
        leaving = [(key, _packed(one)) for key, one in staying.items() if (firsts[key[0]], key[1]) not in here]
        for key, episode in (*staying.items(), *self.rollouts.gather(leaving)):
            place, number = here.get((firsts[key[0]], key[1])), table[key[0]].case
            if place is not None:
                batch.keys[place], batch.numbers[place], batch.episodes[place] = key, number, episode
                batch.cases[place] = episode.session.case = self.settings.cases[number]
        batch.dropped = sum(table[group].dropped for group in firsts)

    def _metrics(self, rounds: int) -> dict[str, float]:
        """Counts of all groups, and the mean of their scores."""
        discarded = [group for number, group in self.table.items() if number not in self.places.values()]
        scores = [score for group in self.table.values() for score in group.scores]
        return {
            "cases/played_groups": float(len(self.table)),
            "cases/discarded_groups": float(len(discarded)),
            "cases/discarded_tokens": float(sum(group.tokens for group in discarded)),
            "cases/refill_rounds": float(rounds),
            **({"cases/mean_score": sum(scores) / len(scores)} if scores else {}),
        }


def _packed(episode: Episode) -> Episode:
    """The episode without its case and its side of the environment, to be sent to another rank."""
    packed = copy(episode)
    packed.session = replace(episode.session, session=None, case=Case(None, "", {}))
    return packed
