"""The order of the training cases: which case each group of a generation batch plays.

Epochs are one stream of cases: each uses each case once, even if its last step is incomplete. TRL drops the last
incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees the whole run as one
epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

import inspect
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case, arguments_for
from aitrain.environment.user_modules import load_function
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.execution.user_code import failure_message
from aitrain.runs.json_values import JsonObject, as_object

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


# -- several environments


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


# -- the user's function (--custom-sampler)


PARAMETERS = ("cases", "count", "scores", "batch", "random")
"""What the function may ask for, by name."""
KEPT_SCORES = 32
"""Latest groups of each case whose scores the function gets."""


def load_sampler(place: str) -> Callable[..., Any]:
    """The user's function.

    Raises:
        ConfigError: it cannot be loaded, or asks for what there is not.
        EnvironmentFailed: its module raised.
    """
    function = load_function("custom_sampler", place)
    for one in inspect.signature(function).parameters.values():
        is_named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_named and one.default is one.empty and one.name not in PARAMETERS:
            near = did_you_mean(one.name, PARAMETERS)
            raise ConfigError(
                f"custom_sampler: the function has an unknown parameter, {one.name}.{near}\n"
                f"It may have: {', '.join(PARAMETERS)}"
            )
    return function


@dataclass
class CustomOrder:
    """Asks the user's function on the first rank, and sends its answer to the others."""

    function: Callable[..., Any]
    cases: Sequence[Case]
    groups: int
    seed: int
    share: Callable[[list[Any]], list[Any]]
    """Joins lists of all ranks; every rank must call it."""
    is_first: bool
    learns: bool = field(default=True, init=False)
    _scores: dict[int, list[float]] = field(default_factory=dict, init=False)
    """Mean scores of each case's groups, the latest one last."""
    _last: int = field(default=0, init=False)

    def batch(self, index: int) -> list[int]:
        """The function's choice."""
        self._last = index
        return self._ask(self.groups, random.Random(f"{self.seed}/sampler/{index}"))

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int]:
        """What the function chooses instead, without the cases that are in use."""
        source = random.Random(f"{self.seed}/sampler/{self._last}/{len(used)}")
        chosen = dict.fromkeys(self._ask(len(replaced), source))
        return [case for case in chosen if case not in used]

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """Keep the mean score of each group that has one."""
        for group in groups:
            if group.scores:
                scores = [*self._scores.get(group.case, ()), sum(group.scores) / len(group.scores)]
                self._scores[group.case] = scores[-KEPT_SCORES:]

    def metrics(self) -> dict[str, float]:
        """The share of the cases that have a score."""
        return {"cases/played": len(self._scores) / len(self.cases)}

    def state(self) -> JsonObject:
        """The kept scores."""
        return {"scores": {str(case): scores for case, scores in self._scores.items()}}

    def restore(self, state: JsonObject) -> None:
        """Continue with these scores."""
        scores = state.get("scores")
        if isinstance(scores, dict):
            self._scores = {int(case): list(map(float, found)) for case, found in scores.items()}

    @cached_property
    def _rows(self) -> list[Mapping[str, Any]]:
        return [MappingProxyType(dict(case.row)) for case in self.cases]

    def _ask(self, count: int, source: random.Random) -> list[int]:
        answers = self.share([self._answer(count, source)] if self.is_first else [])
        if isinstance(answers[0], EnvironmentFailed):
            raise answers[0]
        return list(answers[0])

    def _answer(self, count: int, source: random.Random) -> list[int] | EnvironmentFailed:
        """The function's answer, or what is wrong with it; an error must reach all ranks."""
        scores = [tuple(self._scores.get(case, ())) for case in range(len(self.cases))]
        values = {"cases": self._rows, "count": count, "scores": scores, "batch": self._last, "random": source}
        try:
            answer = list(self.function(**arguments_for(self.function, values)))
        except Exception as error:
            return EnvironmentFailed(failure_message("custom_sampler raised", error))
        if len(answer) != count:
            return EnvironmentFailed(f"custom_sampler returned {len(answer)} case numbers, and not count={count}")
        for one in answer:
            if isinstance(one, bool) or not hasattr(one, "__index__") or not 0 <= int(one) < len(self.cases):
                last = len(self.cases) - 1
                return EnvironmentFailed(f"custom_sampler returned {one!r:.60}, and cases are numbered 0 to {last}")
        return [int(one) for one in answer]


# -- what transformers sees


class CaseSampler(Sampler[int]):
    """As many rows as TRL consumes: each generation batch once for each step on it, each case `generations` times.

    TRL only counts the rows; the order of the cases says which ones a batch has.
    """

    def __init__(self, schedule: CaseSchedule, generations: int) -> None:
        self.schedule, self.generations = schedule, generations

    def __len__(self) -> int:
        plan = self.schedule
        return plan.batches * plan.updates * plan.prompts * self.generations

    def __iter__(self) -> Iterator[int]:
        yield from (row % self.schedule.cases for row in range(len(self)))


class EpochCallback(TrainerCallback):  # type: ignore[misc]
    """Sets the fractional epoch, and saves and logs at the end of each epoch as transformers does."""

    def __init__(self, schedule: CaseSchedule) -> None:
        self.schedule = schedule

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs before the step is logged and saved; the end of the run is handled by transformers."""
        state.epoch = self.schedule.epochs_after(state.global_step)
        if not self.schedule.ends_epoch(state.global_step):
            return
        if state.global_step < state.max_steps:
            control.should_save |= args.save_strategy == IntervalStrategy.EPOCH
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        # consumes the random number of plain TRL's new DataLoader; also in the last step, from which a run may continue
        torch.empty((), dtype=torch.int64).random_()
