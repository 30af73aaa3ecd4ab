"""What follows the first episodes of a generation batch: the order of cases sees the results, and with
`--rl-sampling refill` groups of other cases replace those without advantages.

Each rank plays the replacing episodes that it trains on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch

from aitrain.environment.contract import Case
from aitrain.environment.dataset import Cases
from aitrain.environment.runner import Runner
from aitrain.training.case_order import (
    CaseOrder,
    CustomOrder,
    DifficultyOrder,
    MixedOrder,
    PlayedGroup,
    RefillingOrder,
    UniformOrder,
    load_sampler,
)
from aitrain.training.holdout import parts_of
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import DiscardedEpisode, TrainingBatch, finish_groups, is_kept, play_members
from aitrain.training.zero_variance import has_advantages

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


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
    current: list[int] = field(default_factory=list)
    """The groups that are in the batch."""

    def __post_init__(self) -> None:
        self._enter(range(len(self.batch.keys)), 0)
        self.current = list(self.table)

    def fill(self, refill: Refill) -> None:
        """Replace groups until all have advantages."""
        free, rounds = refill.groups_per_step + min(self.table) * refill.limit, 0
        while rounds < refill.limit:
            flat = [group for group in self.current if not self.table[group].has_advantages]
            replaced = [self.table[group].case for group in flat]
            others = refill.order.others(replaced, {group.case for group in self.table.values()}) if flat else []
            found = [(group, case) for group, case in zip(flat, others, strict=False) if case is not None]
            if not found:
                break
            rounds += 1
            self._replace({group: (number, case) for number, (group, case) in enumerate(found, free)}, rounds)
            free += len(found)
        self.batch.dropped = sum(self.table[group].dropped for group in self.current)
        self.batch.metrics = self._metrics(rounds)

    def _replace(self, new: dict[int, tuple[int, int]], round: int) -> None:
        """Play others in the place of groups, given the number and the case of each; a rank plays what it trains on."""
        batch, rollouts = self.batch, self.rollouts
        places = [place for place, (group, _) in enumerate(batch.keys) if group in new]
        for place in places:
            group, member = batch.keys[place]
            discarded = DiscardedEpisode(batch.episodes[place], batch.keys[place], self.table[group].round)
            batch.discarded.append(discarded)
            number, case = new[group]
            batch.keys[place] = (number, member)
            batch.numbers[place], batch.cases[place] = case, self.settings.cases[case]
        most = max(rollouts.gather([len(places)]))  # all ranks play as many times, as they may generate together
        at_once = rollouts.rollout.runner.episodes_at_once or most
        for start in range(0, most, at_once):
            part = places[start : start + at_once]
            members = [(batch.keys[place], batch.numbers[place]) for place in part]
            episodes = play_members(rollouts, batch.step, members, [batch.cases[place] for place in part])
            for place, episode in zip(part, episodes, strict=True):
                batch.episodes[place] = episode
        finish_groups(rollouts, [batch.episodes[place] for place in places], [batch.keys[place] for place in places])
        self._enter(places, round)
        self.current = [new[group][0] if group in new else group for group in self.current]

    def _enter(self, places: Sequence[int], round: int) -> None:
        """Enter the groups of this rank's episodes into the table, on all ranks."""
        batch, own = self.batch, []
        for place in places:
            one = batch.episodes[place]
            is_in_loss = is_kept(one, self.settings.masks_truncated)
            values = (one.result.score, is_in_loss, one.trajectory.sampled_tokens, one.is_dropped)
            own.append((batch.keys[place], batch.numbers[place], *values))
        for group, rows in groupby(sorted(self.rollouts.gather(own)), key=lambda row: row[0][0]):
            _, numbers, scores, kept, tokens, dropped = zip(*rows, strict=True)
            tensor = torch.tensor([math.nan if score is None else score for score in scores])
            teaches = bool(has_advantages(tensor, torch.tensor(kept), len(kept)))
            known = [score for score in scores if score is not None]
            self.table[group] = _Group(numbers[0], known, teaches, sum(tokens), sum(dropped), round)

    def _metrics(self, rounds: int) -> dict[str, float]:
        """Counts of all groups, and the mean of their scores."""
        discarded = [group for number, group in self.table.items() if number not in self.current]
        scores = [score for group in self.table.values() for score in group.scores]
        return {
            "cases/played_groups": float(len(self.table)),
            "cases/discarded_groups": float(len(discarded)),
            "cases/discarded_tokens": float(sum(group.tokens for group in discarded)),
            "cases/refill_rounds": float(rounds),
            **({"cases/mean_score": sum(scores) / len(scores)} if scores else {}),
        }


T = TypeVar("T", UniformOrder, DifficultyOrder)


def case_choice(trainer: EpisodeTrainer, runner: Runner) -> BatchCompletion:
    """The order of the trainer's cases, and how its batches are completed."""
    config, plan, arguments, cases = runner.config, trainer.schedule, trainer.args, trainer.cases
    shuffled = arguments.seed if trainer.shuffle_dataset else None

    def of_each(make: Callable[[Cases], T]) -> T | MixedOrder:
        orders = {part.env: make(part) for part in parts_of(cases)}
        return orders.get("") or MixedOrder(orders, list(config.env_shares.values()), plan.prompts)

    refilling: RefillingOrder = of_each(lambda part: UniformOrder(len(part), plan.prompts, shuffled))
    if config.custom_sampler is not None:
        function, is_first = load_sampler(config.custom_sampler), arguments.process_index == 0
        gather = trainer.rollouts.gather
        refilling = CustomOrder(function, cases, plan.prompts, arguments.seed, gather, is_first)
    order: CaseOrder = refilling
    if config.rl_sampling == "difficulty":
        bounds = {name: part.config.score_bounds for name, part in runner.parts.items()}
        order = of_each(lambda part: DifficultyOrder(len(part), plan.prompts, arguments.seed, bounds[part.env]))
    refill = None
    if config.rl_sampling == "refill":
        refill = Refill(refilling, config.rl_refill_limit, plan.prompts)
    return BatchCompletion(cases, order, trainer.masks_truncated, refill)
