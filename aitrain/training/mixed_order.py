"""The order of the cases of several environments: which environment each group of a batch is of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

from aitrain.runs.json_values import JsonObject, as_object
from aitrain.training.case_order import DifficultyOrder, PlayedGroup, UniformOrder

EnvOrder: TypeAlias = UniformOrder | DifficultyOrder


@dataclass
class MixedOrder:
    """Gives each environment its share of the groups: at any time, each has had its share of all groups so far, to
    within a group (two with more than four environments). Which of its cases they are is decided by an order of its
    own."""

    orders: Mapping[str, EnvOrder]
    weights: Sequence[float]
    groups: int
    """Groups of one generation batch, over all ranks."""
    _turns: list[int] = field(default_factory=list, init=False)
    """The environment of each group from the beginning of the run on, as far as it was asked for."""
    _counts: list[int] = field(default_factory=list, init=False)
    """Groups of each environment in `_turns`."""

    def __post_init__(self) -> None:
        self._own = list(self.orders.values())
        self._starts = [0, *accumulate(order.cases for order in self._own)]
        self._counts = [0] * len(self._own)

    @property
    def learns(self) -> bool:
        """Whether the choice depends on the played groups."""
        return any(order.learns for order in self._own)

    def batch(self, index: int) -> list[int]:
        """The case number of each group of a batch; the environments take turns."""
        first = index * self.groups
        turns = self._turns_until(first + self.groups)[first:]
        drawn = []
        for place, order in enumerate(self._own):
            taken = order.take(self._turns[:first].count(place), turns.count(place))
            drawn.append(iter(taken))
        return [self._starts[place] + next(drawn[place]) for place in turns]

    def _turns_until(self, end: int) -> list[int]:
        """The environments of the groups before `end`: each time the one that is the furthest behind its share."""
        total = sum(self.weights)
        while len(self._turns) < end:
            due = len(self._turns) + 1
            behind = [weight * due - count * total for weight, count in zip(self.weights, self._counts, strict=True)]
            place = behind.index(max(behind))
            self._turns.append(place)
            self._counts[place] += 1
        return self._turns[:end]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int | None]:
        """Another case of the same environment for each of the `replaced` ones, without those that are in use; None if
        that environment has none left."""
        found = dict[int, list[int]]()
        for place, order in enumerate(self._own):
            own = [case - self._starts[place] for case in replaced if self._place_of(case) == place]
            if own and isinstance(order, UniformOrder):
                in_use = {case - self._starts[place] for case in used if self._place_of(case) == place}
                found[place] = [case + self._starts[place] for case in order.others(own, in_use)]
        return [found[place].pop(0) if found.get(place) else None for place in map(self._place_of, replaced)]

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """Give each order the groups of its environment."""
        for place, order in enumerate(self._own):
            own = [group for group in groups if self._place_of(group.case) == place]
            order.see([replace(group, case=group.case - self._starts[place]) for group in own])

    def metrics(self) -> dict[str, float]:
        """The metrics of each environment's order."""
        return {
            f"env/{name}/{metric}": value
            for name, order in self.orders.items()
            for metric, value in order.metrics().items()
        }

    def state(self) -> JsonObject:
        """The states of the orders by the names of their environments."""
        return {name: state for name, order in self.orders.items() if (state := order.state())}

    def restore(self, state: JsonObject) -> None:
        """Continue with the `state` of an earlier process."""
        for name, order in self.orders.items():
            order.restore(as_object(state.get(name)))

    def _place_of(self, case: int) -> int:
        """The environment of a case."""
        return next(place for place, end in enumerate(self._starts[1:]) if case < end)
