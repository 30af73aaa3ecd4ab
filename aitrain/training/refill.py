"""What follows the first episodes of a generation batch: the order of cases sees the results, and with
`--rl-sampling refill` groups of other cases replace those without advantages.

Replacing groups are played by all ranks in equal parts. An episode then moves to the rank that trains on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import torch

from aitrain.environment.contract import Case
from aitrain.environment.dataset import Cases
from aitrain.rollout.episode import Episode
from aitrain.training.case_order import CaseOrder, PlayedGroup, RefillingOrder
from aitrain.training.episode_groups import MemberKey, finish_groups
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import DiscardedEpisode, TrainingBatch, is_kept, play_members
from aitrain.training.zero_variance import has_advantages

Member: TypeAlias = tuple[MemberKey, int]
"""The key of an episode, and the number of its case."""


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

    rollouts: PolicyRollouts
    cases: Cases
    order: CaseOrder
    masks_truncated: bool
    """Whether truncated episodes are left out of the loss."""
    refill: Refill | None = None

    def complete(self, batch: TrainingBatch) -> None:
        """Replace groups of a played batch, and let the order see all that were played. Every rank must call this."""
        if self.refill is None and not self.order.learns:
            return
        members = zip(batch.keys, batch.numbers, strict=True)
        table = self._table(zip(members, batch.episodes, strict=True), 0)
        if self.refill is not None:
            self._replace(self.refill, batch, table)
        self.order.see([PlayedGroup(group.case, tuple(group.scores)) for group in table.values()])
        batch.metrics |= self.order.metrics()

    def _replace(self, refill: Refill, batch: TrainingBatch, table: dict[int, _Group]) -> None:
        """Replace groups until all have advantages. `table` has the batch's groups, and gets the others."""
        places = {group: group for group in table}  # first groups, and the group that is in the place of each
        own: dict[MemberKey, Episode] = {}
        free, rounds = refill.groups_per_step + min(table) * refill.limit, 0
        while rounds < refill.limit:
            flat = [first for first, group in places.items() if not table[group].has_advantages]
            replaced, used = [table[places[first]].case for first in flat], {group.case for group in table.values()}
            numbers = refill.order.others(replaced, used) if flat else []
            if not numbers:
                break
            rounds += 1
            groups, free = range(free, free + len(numbers)), free + len(numbers)
            members = [
                ((group, member), number)
                for group, number in zip(groups, numbers, strict=True)
                for member in range(batch.group_size)
            ]
            played = self._play(batch.step, members)
            own |= {key: episode for (key, _), episode in played}
            table |= self._table(played, rounds)
            places |= dict(zip(flat, groups, strict=False))
        if rounds:
            self._exchange(batch, places, own, table)
        batch.dropped = sum(table[group].dropped for group in places.values())
        batch.metrics = _metrics(table, places)

    def _play(self, step: int, members: list[Member]) -> list[tuple[Member, Episode]]:
        """This rank's part of these episodes. All ranks play as many batches, as they may generate together."""
        accelerator, runner = self.rollouts.accelerator, self.rollouts.rollout.runner
        share = math.ceil(len(members) / accelerator.num_processes)
        own = members[accelerator.process_index * share :][:share]
        size = (runner.config.rl_env_episodes if runner.has_sessions else None) or share
        episodes: list[Episode] = []
        for start in range(0, share, size):
            part = own[start : start + size]
            episodes += play_members(self.rollouts, step, part, [self.cases[number] for _, number in part])
        finish_groups(self.rollouts, episodes, [key for key, _ in own])
        return list(zip(own, episodes, strict=True))

    def _table(self, played: Iterable[tuple[Member, Episode]], round: int) -> dict[int, _Group]:
        """The played groups of all ranks, by their numbers."""
        own = [
            (key, number, one.result.score, is_kept(one, self.masks_truncated), one.trajectory.sampled_tokens,
             one.is_dropped)
            for (key, number), one in played
        ]  # fmt: skip
        table = {}
        for group, rows in groupby(sorted(self.rollouts.gather(own)), key=lambda row: row[0][0]):
            _, numbers, scores, kept, tokens, dropped = zip(*rows, strict=True)
            tensor = torch.tensor([math.nan if score is None else score for score in scores])
            teaches = bool(has_advantages(tensor, torch.tensor(kept), len(kept)))
            known = [score for score in scores if score is not None]
            table[group] = _Group(numbers[0], known, teaches, sum(tokens), sum(dropped), round)
        return table

    def _exchange(
        self, batch: TrainingBatch, places: dict[int, int], own: dict[MemberKey, Episode], table: dict[int, _Group]
    ) -> None:
        """Put the episodes of the final groups into the batch, on the ranks that train on them."""
        firsts = {group: first for first, group in places.items()}
        here = {key: place for place, key in enumerate(batch.keys)}
        final = {key: episode for key, episode in own.items() if key[0] in firsts}
        batch.discarded = [
            *(DiscardedEpisode(one, key, 0) for key, one in zip(batch.keys, batch.episodes, strict=True)
              if key[0] not in firsts),
            *(DiscardedEpisode(one, key, table[key[0]].round) for key, one in own.items() if key not in final),
        ]  # fmt: skip
        moving = [(key, _packed(one)) for key, one in final.items() if (firsts[key[0]], key[1]) not in here]
        for key, episode in (*final.items(), *self.rollouts.gather(moving)):
            place = here.get((firsts[key[0]], key[1]))
            if place is not None:
                number = table[key[0]].case
                batch.keys[place], batch.numbers[place], batch.episodes[place] = key, number, episode
                batch.cases[place] = episode.session.case = self.cases[number]


def _packed(episode: Episode) -> Episode:
    """The episode without its case and its side of the environment, to be sent to another rank."""
    packed = copy(episode)
    packed.session = replace(episode.session, session=None, case=Case(None, "", {}))
    return packed


def _metrics(table: dict[int, _Group], places: dict[int, int]) -> dict[str, float]:
    """Counts of all groups that were played for a batch, and the mean of their scores."""
    discarded = [group for number, group in table.items() if number not in places.values()]
    scores = [score for group in table.values() for score in group.scores]
    return {
        "cases/played_groups": float(len(table)),
        "cases/discarded_groups": float(len(discarded)),
        "cases/discarded_tokens": float(sum(group.tokens for group in discarded)),
        "cases/refill_rounds": float(max(group.round for group in table.values())),
        **({"cases/mean_score": sum(scores) / len(scores)} if scores else {}),
    }
