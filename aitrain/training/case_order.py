"""The order of the training cases: which case each group of a generation batch plays."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Protocol

import torch

from aitrain.runs.json_values import JsonObject

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


class CaseOrder(Protocol):
    """Chooses the cases of generation batches. All ranks make the same calls and get the same answers, and a resumed
    run, which restores `state`, makes those that it would have made."""

    @property
    def learns(self) -> bool:
        """Whether the choice depends on the played groups, which `see` then needs."""
        ...

    def batch(self, index: int) -> list[int]:
        """The case number of each group of generation batch `index`, counted from the beginning of the run."""
        ...

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """Take note of all groups that were played for a batch."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the choice, the same on all ranks."""
        ...

    def state(self) -> JsonObject:
        """What a checkpoint holds of the order; empty if the number of the batch says all."""
        ...

    def restore(self, state: JsonObject) -> None:
        """Continue with the `state` of an earlier process."""
        ...


class RefillingOrder(CaseOrder, Protocol):
    """An order for `--rl-sampling refill`."""

    def others(self, replaced: Sequence[int], used: Collection[int]) -> Sequence[int | None]:
        """A case that is not in `used` for each of the `replaced` ones of the last batch, in their order; None, or
        fewer, if none is left."""
        ...


@dataclass
class UniformOrder:
    """Epochs as one stream of cases: each epoch has each case once, and a batch may hold the last cases of one epoch
    and the first of the next. The order is that of TRL's sampler if the cases fill whole batches. Cases that replace
    others are the next ones of the stream."""

    cases: int
    """Cases of one epoch."""
    groups: int
    """Groups of one generation batch, over all ranks."""
    seed: int | None
    """Each epoch is shuffled with it; None: the order of the dataset."""
    learns: bool = field(default=False, init=False)
    _stream: Iterator[int] | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    """Place in the stream of the next case."""
    _replacing: int = field(default=0, init=False)
    """Cases of the stream that were drawn to replace others."""

    def batch(self, index: int) -> list[int]:
        """Batches are computed in order; an earlier one starts from the beginning of the stream."""
        return self.take(index * self.groups, self.groups)

    def take(self, place: int, count: int) -> list[int]:
        """Cases of the stream, for groups that are the batches' from `place` on."""
        place += self._replacing
        if self._stream is None or place < self._next:
            self._stream, self._next = self._cases(), 0
        return self._draw(count + place - self._next)[-count:] if count else []

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int]:
        """The next cases; those that are in use already are passed over, for at most an epoch."""
        found: list[int] = []
        for _ in range(self.cases):
            if len(found) == len(replaced):
                break
            (case,) = self._draw(1)
            self._replacing += 1
            if case not in used and case not in found:
                found.append(case)
        return found

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """No-op: the order is fixed."""

    def metrics(self) -> dict[str, float]:
        """None: nothing was learned."""
        return {}

    def state(self) -> JsonObject:
        """The number of cases that have replaced others."""
        return {"replacing": self._replacing} if self._replacing else {}

    def restore(self, state: JsonObject) -> None:
        """Continue after the cases that have replaced others."""
        replacing = state.get("replacing", 0)
        self._replacing = replacing if isinstance(replacing, int) else 0

    def _draw(self, count: int) -> list[int]:
        self._next += count
        return list(islice(self._stream or self._cases(), count))

    def _cases(self) -> Iterator[int]:
        """Case numbers of epoch after epoch, endless."""
        generator = torch.Generator()
        if self.seed is not None:
            generator.manual_seed(self.seed)
        while True:
            if self.seed is None:
                yield from range(self.cases)
            else:
                yield from torch.randperm(self.cases, generator=generator).tolist()


@dataclass
class DifficultyOrder:
    """Draws the cases of each batch by how much their scores have varied: a case that is always solved, or never,
    becomes rare. Only sums, products and quotients are used, which are equal on all machines."""

    cases: int
    groups: int
    seed: int
    bounds: tuple[float, float]
    """Lowest and highest score."""
    learns: bool = field(default=True, init=False)
    _moments: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    """Moving mean and mean square of each played case's scores, as fractions of the score range."""
    _weights: list[float] = field(default_factory=list, init=False)

    def batch(self, index: int) -> list[int]:
        """Cases of one batch; none is in it twice, unless there are fewer than groups."""
        return self.take(index * self.groups, self.groups)

    def take(self, place: int, count: int) -> list[int]:
        """Cases for the groups of the batches from `place` on."""
        self._weights = self._weights or [self.weight(case) for case in range(self.cases)]
        equal = EQUAL_SHARE / (1 - EQUAL_SHARE) * sum(self._weights) / self.cases
        bounds = list(accumulate(weight + equal for weight in self._weights))
        source = random.Random(f"{self.seed}/cases/{place}")
        drawn: list[int] = []
        left = set[int]()
        while len(drawn) < count:
            left = left or set(range(self.cases))
            case = min(bisect_right(bounds, source.random() * bounds[-1]), self.cases - 1)
            if case in left:
                drawn.append(case)
                left.remove(case)
        return drawn

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """Move the mean and the mean square of each case. A group without any score counts as an episode that is not
        solved, so that a case that always fails becomes rare."""
        low, high = self.bounds
        for group in groups:
            scores = [(score - low) / (high - low) for score in group.scores] or [0.0]
            mean, square = self._moments.get(group.case, (0.5, 0.5))
            count = KNOWN + len(scores)
            self._moments[group.case] = (
                (KNOWN * mean + sum(scores)) / count,
                (KNOWN * square + sum(score * score for score in scores)) / count,
            )
            if self._weights:
                self._weights[group.case] = self.weight(group.case)

    def weight(self, case: int) -> float:
        """The variance of a case's scores as a fraction of the largest possible one; 1 for a case that was not played
        yet."""
        mean, square = self._moments.get(case, (0.5, 0.5))
        return max(SMALLEST, 4 * (square - mean * mean))

    def metrics(self) -> dict[str, float]:
        """The share of the cases that were played, and the mean weight."""
        return {
            "cases/played": len(self._moments) / self.cases,
            "cases/mean_weight": sum(self._weights) / self.cases,
        }

    def state(self) -> JsonObject:
        """The moving means."""
        return {"moments": {str(case): list(moments) for case, moments in self._moments.items()}}

    def restore(self, state: JsonObject) -> None:
        """Continue with these moving means."""
        moments = state.get("moments")
        if isinstance(moments, dict):
            self._moments = {int(case): (float(mean), float(square)) for case, (mean, square) in moments.items()}
            self._weights = []
