"""The order of the training cases: which case each group of a generation batch plays.

Epochs are one stream of cases: each uses each case once, even if its last step is incomplete. TRL drops the last
incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees the whole run as one
epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from trl import GRPOConfig

from aitrain.environment.runner import Runner
from aitrain.training.holdout import CaseList, parts_of


@dataclass
class UniformOrder:
    """The order of one environment's cases. All ranks make the same calls and get the same answers, and a resumed run,
    which restores `state`, makes those that it would have made.

    Each epoch has each case once, and a batch may hold the last cases of one epoch and the first of the next. The order
    is that of TRL's sampler if the cases fill whole batches. Cases that replace others are the next ones of the stream.
    """

    cases: int
    """Cases of one epoch."""
    groups: int
    """Groups of a batch, over all ranks."""
    seed: int | None
    """Each epoch is shuffled with it; None: the order of the dataset."""
    replacing: int = field(default=0, init=False)
    """Cases of the stream that were drawn to replace others."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed or 0)
        self._epochs: list[torch.Tensor] = []
        self._next = 0  # place in the stream of the next case

    def batch(self, index: int) -> list[int]:
        """The case number of each group of generation batch `index`, counted from the beginning of the run."""
        return self.take(index * self.groups, self.groups)

    def take(self, place: int, count: int) -> list[int]:
        """The case numbers of `count` groups, the first of which is the run's group number `place`."""
        self._next = place + self.replacing
        return [self._draw() for _ in range(count)]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> Sequence[int | None]:
        """Another case for each of the `replaced` ones of the last batch: the next ones, without those in `used`, which
        are passed over for at most an epoch. Fewer, if no other is left."""
        found: list[int] = []
        for _ in range(self.cases):
            if len(found) == len(replaced):
                break
            case = self._draw()
            self.replacing += 1
            if case not in used and case not in found:
                found.append(case)
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the order beside the number of the batch."""
        return {"replacing": self.replacing}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the `state` of an earlier process."""
        self.replacing = state.get("replacing", 0)

    def _draw(self) -> int:
        epoch, place = divmod(self._next, self.cases)
        self._next += 1
        if self.seed is None:
            return place
        while len(self._epochs) <= epoch:
            self._epochs.append(torch.randperm(self.cases, generator=self._generator))
        return int(self._epochs[epoch][place])


@dataclass
class MixedOrder:
    """Gives each environment its share of the groups: at any time, each has had its share of all groups so far, to
    within a group (two with more than four environments). Which of its cases they are is decided by an order of its
    own."""

    orders: Mapping[str, UniformOrder]
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

    def batch(self, index: int) -> list[int]:
        """As that of one environment. The environments take turns: each time the one that is the furthest behind its
        share."""
        shares = dict(zip(self.orders, self.weights, strict=True))
        place = index * self.groups
        while len(self._turns) < place + self.groups:
            due = len(self._turns) + 1
            behind = {name: shares[name] * due - self._counts[name] * sum(self.weights) for name in shares}
            name = max(behind, key=behind.__getitem__)
            self._turns.append(name)
            self._counts[name] += 1
        before, turns = self._turns[:place], self._turns[place : place + self.groups]
        drawn = {name: iter(one.take(before.count(name), turns.count(name))) for name, one in self.orders.items()}
        return [self._first[name] + next(drawn[name]) for name in turns]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> Sequence[int | None]:
        """Another case of the same environment for each of the `replaced` ones, without those that are in use; None if
        that environment has none left."""
        found = {}
        for name, order in self.orders.items():
            in_use = {case - self._first[name] for case in used if self._env_of[case] == name}
            own = [case - self._first[name] for case in replaced if self._env_of[case] == name]
            found[name] = iter(order.others(own, in_use))
        chosen = [(name, next(found[name], None)) for name in (self._env_of[case] for case in replaced)]
        return [None if case is None else self._first[name] + case for name, case in chosen]

    def state(self) -> dict[str, Any]:
        """The states of the orders by the names of their environments."""
        return {name: order.state() for name, order in self.orders.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the states of these orders."""
        for name, order in self.orders.items():
            order.restore(state.get(name, {}))


CaseOrder: TypeAlias = UniformOrder | MixedOrder


def case_order(runner: Runner, cases: CaseList, groups: int, arguments: GRPOConfig) -> CaseOrder:
    """The order of a run's cases, by its options, with `groups` in a batch."""
    seed = arguments.seed if arguments.shuffle_dataset else None
    orders = {part.env: UniformOrder(len(part), groups, seed) for part in parts_of(cases)}
    return orders.get("") or MixedOrder(orders, list(runner.config.env_shares.values()), groups)
