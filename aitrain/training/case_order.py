"""The order of the training cases: which case each group of a generation batch plays.

Epochs are one stream of cases: each uses each case once, even if its last step is incomplete. TRL drops the last
incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees the whole run as one
epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from trl import GRPOConfig

from aitrain.environment.runner import Runner
from aitrain.training.holdout import CaseList, parts_of

EQUAL_SHARE = 0.2
"""Share of the draws of DifficultyOrder in which all cases are equally likely, so that none disappears."""
KNOWN = 1.0
"""Number of episodes that the moving means of a case count as when a group is added."""
SMALLEST = 1e-3
"""Smallest weight of a case in DifficultyOrder; a case that is solved half the time has 1."""


@dataclass(frozen=True)
class PlayedGroup:
    """A group of any rank that was played, whether it is trained on or discarded."""

    case: int
    scores: tuple[float, ...]
    """Scores of the episodes that have one."""


class CaseOrder:
    """Chooses the cases of generation batches. All ranks make the same calls and get the same answers, and a resumed
    run, which restores `state`, makes those that it would have made. Its number of cases and of `groups` in a batch
    are over all ranks."""

    groups: int
    memory: dict[Any, Any]
    """What a checkpoint holds of the order beside the number of the batch."""

    def batch(self, index: int) -> list[int]:
        """The case number of each group of generation batch `index`, counted from the beginning of the run."""
        return self.take(index * self.groups, self.groups)

    def take(self, place: int, count: int) -> list[int]:
        """The case numbers of `count` groups, the first of which is the run's group number `place`."""
        raise NotImplementedError

    def others(self, replaced: Sequence[int], used: Collection[int]) -> Sequence[int | None]:
        """A case that is not in `used` for each of the `replaced` ones of the last batch, in their order; None, or
        fewer, if none is left."""
        return []

    def see(self, groups: Iterable[PlayedGroup]) -> None:
        """Take note of all groups that were played for a batch."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the choice, the same on all ranks."""
        return {}

    def state(self) -> dict[Any, Any]:
        """A copy of the memory."""
        return dict(self.memory)

    def restore(self, state: Mapping[Any, Any]) -> None:
        """Continue with the `state` of an earlier process."""
        self.memory = dict(state)


@dataclass
class UniformOrder(CaseOrder):
    """Epochs as one stream of cases: each epoch has each case once, and a batch may hold the last cases of one epoch
    and the first of the next. The order is that of TRL's sampler if the cases fill whole batches. Cases that replace
    others are the next ones of the stream."""

    cases: int
    """Cases of one epoch."""
    groups: int
    seed: int | None
    """Each epoch is shuffled with it; None: the order of the dataset."""
    memory: dict[str, int] = field(default_factory=dict, init=False)
    """`replacing`: cases of the stream that were drawn to replace others."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed or 0)
        self._epochs: list[torch.Tensor] = []
        self._next = 0  # place in the stream of the next case

    def take(self, place: int, count: int) -> list[int]:
        """The cases at these places of the stream."""
        self._next = place + self.memory.get("replacing", 0)
        return [self._draw() for _ in range(count)]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int]:
        """The next cases; those that are in use already are passed over, for at most an epoch."""
        found: list[int] = []
        for _ in range(self.cases):
            if len(found) == len(replaced):
                break
            case = self._draw()
            self.memory["replacing"] = self.memory.get("replacing", 0) + 1
            if case not in used and case not in found:
                found.append(case)
        return found

    def _draw(self) -> int:
        epoch, place = divmod(self._next, self.cases)
        self._next += 1
        if self.seed is None:
            return place
        while len(self._epochs) <= epoch:
            self._epochs.append(torch.randperm(self.cases, generator=self._generator))
        return int(self._epochs[epoch][place])


@dataclass
class DifficultyOrder(CaseOrder):
    """Draws the cases of each batch by how much their scores have varied: a case that is always solved, or never,
    becomes rare. Only sums, products and quotients are used, which are equal on all machines."""

    cases: int
    groups: int
    seed: int
    bounds: tuple[float, float]
    """Lowest and highest score."""
    memory: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    """Moving mean and mean square of each played case's scores, as fractions of the score range."""

    def take(self, place: int, count: int) -> list[int]:
        """Cases drawn at random; none is among them twice, unless there are fewer than `count`."""
        weights = [self.weight(case) for case in range(self.cases)]
        equal = EQUAL_SHARE / (1 - EQUAL_SHARE) * sum(weights) / self.cases
        bounds = list(accumulate(weight + equal for weight in weights))
        source = random.Random(f"{self.seed}/cases/{place}")
        drawn: list[int] = []
        left = set[int]()
        while len(drawn) < count:
            left = left or set(range(self.cases))
            (case,) = source.choices(range(self.cases), cum_weights=bounds)
            if case in left:
                drawn.append(case)
                left.remove(case)
        return drawn

    def see(self, groups: Iterable[PlayedGroup]) -> None:
        """Move the mean and the mean square of each case. A group without any score counts as an episode that is not
        solved, so that a case that always fails becomes rare."""
        low, high = self.bounds
        for group in groups:
            scores = [(score - low) / (high - low) for score in group.scores] or [0.0]
            mean, square = self.memory.get(group.case, (0.5, 0.5))
            count = KNOWN + len(scores)
            self.memory[group.case] = (
                (KNOWN * mean + sum(scores)) / count,
                (KNOWN * square + sum(score * score for score in scores)) / count,
            )

    def weight(self, case: int) -> float:
        """The variance of a case's scores as a fraction of the largest possible one; 1 for a case that was not played
        yet."""
        mean, square = self.memory.get(case, (0.5, 0.5))
        return max(SMALLEST, 4 * (square - mean * mean))

    def metrics(self) -> dict[str, float]:
        """The share of the cases that were played, and the mean weight."""
        weights = sum(self.weight(case) for case in range(self.cases))
        return {"cases/played": len(self.memory) / self.cases, "cases/mean_weight": weights / self.cases}


@dataclass
class MixedOrder(CaseOrder):
    """Gives each environment its share of the groups: at any time, each has had its share of all groups so far, to
    within a group (two with more than four environments). Which of its cases they are is decided by an order of its
    own."""

    orders: Mapping[str, UniformOrder | DifficultyOrder]
    weights: Sequence[float]
    groups: int
    _turns: list[str] = field(default_factory=list, init=False)
    """The environment of each group from the beginning of the run on, as far as it was asked for."""

    def __post_init__(self) -> None:
        first = [0, *accumulate(order.cases for order in self.orders.values())]
        self._first = dict(zip(self.orders, first, strict=False))
        """The number of the first case of each environment."""
        self._env_of = [name for name, order in self.orders.items() for _ in range(order.cases)]
        self._counts = dict.fromkeys(self.orders, 0)
        """Groups of each environment in `_turns`."""

    def take(self, place: int, count: int) -> list[int]:
        """The environments take turns: each time the one that is the furthest behind its share."""
        shares = dict(zip(self.orders, self.weights, strict=True))
        while len(self._turns) < place + count:
            due = len(self._turns) + 1
            behind = {name: shares[name] * due - self._counts[name] * sum(self.weights) for name in shares}
            name = max(behind, key=behind.__getitem__)
            self._turns.append(name)
            self._counts[name] += 1
        before, turns = self._turns[:place], self._turns[place : place + count]
        drawn = {name: iter(one.take(before.count(name), turns.count(name))) for name, one in self.orders.items()}
        return [self._first[name] + next(drawn[name]) for name in turns]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int | None]:
        """Another case of the same environment for each of the `replaced` ones, without those that are in use; None if
        that environment has none left."""
        found = {}
        for name, order in self.orders.items():
            in_use = {case - self._first[name] for case in used if self._env_of[case] == name}
            own = [case - self._first[name] for case in replaced if self._env_of[case] == name]
            found[name] = iter(order.others(own, in_use))
        chosen = [(name, next(found[name], None)) for name in (self._env_of[case] for case in replaced)]
        return [None if case is None else self._first[name] + case for name, case in chosen]

    def see(self, groups: Iterable[PlayedGroup]) -> None:
        """Give each order the groups of its environment."""
        for group in groups:
            name = self._env_of[group.case]
            self.orders[name].see([PlayedGroup(group.case - self._first[name], group.scores)])

    def metrics(self) -> dict[str, float]:
        """The metrics of each environment's order."""
        each = {name: order.metrics() for name, order in self.orders.items()}
        return {f"env/{name}/{metric}": value for name, own in each.items() for metric, value in own.items()}

    def state(self) -> dict[str, Any]:
        """The states of the orders by the names of their environments."""
        return {name: order.state() for name, order in self.orders.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the states of these orders."""
        for name, order in self.orders.items():
            order.restore(state.get(name, {}))


def case_order(runner: Runner, cases: CaseList, groups: int, arguments: GRPOConfig) -> CaseOrder:
    """The order of a run's cases, by its options, with `groups` in a batch."""
    config = runner.config
    orders: dict[str, UniformOrder | DifficultyOrder] = {}
    for part in parts_of(cases):
        if config.rl_sampling == "difficulty":
            bounds = runner.parts[part.env].config.score_bounds
            orders[part.env] = DifficultyOrder(len(part), groups, arguments.seed, bounds)
        else:
            seed = arguments.seed if arguments.shuffle_dataset else None
            orders[part.env] = UniformOrder(len(part), groups, seed)
    return orders.get("") or MixedOrder(orders, list(config.env_shares.values()), groups)
