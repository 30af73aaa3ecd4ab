"""Generation batches of the trainer: their cases are chosen and played, when a batch is needed or beside the training
on the one before. With `--rl-sampling refill` groups of other cases replace those without advantages.

Epochs are one stream of cases: each uses each case once, even if its last step is incomplete. TRL drops the last
incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees the whole run as one
epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import Thread
from typing import Any, TypeAlias

import torch
from trl import GRPOConfig

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.runner import Runner
from aitrain.rollout.engine import RolloutClock
from aitrain.training.algorithm import has_advantages
from aitrain.training.holdout import CaseList, parts_of
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import PlannedEpisode, PlayedEpisode, TrainingBatch, finish

REFILLS = 10
"""How often groups of a batch are replaced at most, with `--rl-sampling refill`."""


@dataclass
class BatchSource:
    """Makes and plays generation batches in order. Every rank must call its methods together."""

    rollouts: PolicyRollouts
    cases: Sequence[Case]
    order: CaseOrder
    schedule: CaseSchedule
    group_size: int
    masks_truncated: bool = False
    """Whether truncated episodes are left out of the loss."""
    refill_limit: int = 0
    _state: dict[str, Any] | None = field(default=None, init=False)

    @property
    def clock(self) -> RolloutClock:
        """The clock that has the seconds of each step's rollout."""
        return self.rollouts.rollout.clock

    def take(self, step: int) -> TrainingBatch:
        """The batch that begins after `step` optimizer steps, played."""
        batch = self.play(step, self.rollouts)
        self._state = self.order.state()
        return batch

    def order_state(self) -> dict[str, Any]:
        """The state of the order after the last batch that was taken: a resumed run samples a later one again."""
        return self.order.state() if self._state is None else self._state

    def index_of(self, step: int) -> int:
        """The number of the batch that begins after a step, or of the next one if none does."""
        return -(-step // self.schedule.updates)

    def play(self, step: int, rollouts: PolicyRollouts) -> TrainingBatch:
        """Make and play a batch; batches are played one after the other, in their order. Groups without advantages are
        replaced until all have some, at most `refill_limit` times."""
        cases, accelerator = self.order.batch(self.index_of(step)), rollouts.accelerator
        share = len(cases) * self.group_size // accelerator.num_processes
        first = share * accelerator.process_index
        keys = [divmod(place, self.group_size) for place in range(first, first + share)]
        batch = TrainingBatch(step, [PlannedEpisode(key, cases[key[0]]) for key in keys])
        batch.weight_version = rollouts.weight_version()
        groups = self._play(step, rollouts, batch.planned)
        current = list(groups)
        for round in range(1, self.refill_limit + 1):
            flat = [group for group in current if not self._teaches(groups[group])]
            in_use = {members[0].number for members in groups.values()}
            others = self.order.others([groups[group][0].number for group in flat], in_use) if flat else []
            found = [(group, case) for group, case in zip(flat, others, strict=False) if case is not None]
            if not found:
                break
            new = {group: (number, case) for number, (group, case) in enumerate(found, len(groups))}
            for place, old in enumerate(batch.planned):
                group, member = old.key
                if group in new:
                    batch.discarded.append(old)
                    number, case = new[group]
                    batch.planned[place] = PlannedEpisode((number, member), case, round)
            again = [one for one in batch.planned if one.round == round]
            groups |= self._play(step, rollouts, again, rollouts.rollout.runner.episodes_at_once)
            current = [new[group][0] if group in new else group for group in current]
        batch.everywhere = [one for group in current for one in groups[group]]
        batch.played = [one for members in groups.values() for one in members]
        if self.refill_limit:
            known = [one.score for one in batch.played if one.score is not None]
            batch.metrics = {
                "cases/played_groups": float(len(groups)),
                "cases/discarded_groups": float(len(groups) - len(current)),
                **({"cases/mean_score": sum(known) / len(known)} if known else {}),
            }
        return batch

    def _play(
        self, step: int, rollouts: PolicyRollouts, planned: Sequence[PlannedEpisode], at_once: int | None = None
    ) -> dict[int, list[PlayedEpisode]]:
        """Play this rank's episodes, at most `at_once` at a time; returns the groups of all ranks. The episodes of a
        group have consecutive sampling seeds, and one environment seed."""
        most = max(rollouts.gather([len(planned)]))  # all ranks play as many times, as they may generate together
        for start in range(0, most, at_once or most):
            part = planned[start : start + (at_once or most)]
            episodes = rollouts.play(
                [self.cases[one.number] for one in part],
                [rollouts.env_seed(step, one.number) for one in part],
                [rollouts.sampling_seed(step, one.number, one.key[0]) + one.key[1] for one in part],
            )
            for one, episode in zip(part, episodes, strict=True):
                one.episode = episode
        groups: dict[int, list[PlayedEpisode]] = {}
        for played in finish(rollouts, planned):
            groups.setdefault(played.key[0], []).append(played)
        return groups

    def _teaches(self, members: Sequence[PlayedEpisode]) -> bool:
        """Whether a group has advantages."""
        scores = torch.tensor([math.nan if one.score is None else one.score for one in members])
        kept = torch.tensor([one.is_kept(self.masks_truncated) for one in members])
        return bool(has_advantages(scores, kept, len(members)))


@dataclass
class AheadSource(BatchSource):
    """Plays each batch in a thread while the one before trains (--rl-ahead), with the weights before that training.

    Weights are written and loaded when no batch is played. So a model is not read while it trains, and one thread at a
    time uses the training's process group.
    """

    _next: tuple[int, Future[TrainingBatch]] | None = field(default=None, init=False)
    """The step before the batch that is played ahead, and its result."""
    _clock: RolloutClock = field(default_factory=RolloutClock, init=False)

    def __post_init__(self) -> None:
        self.rollouts.settle = self.settle

    @property
    def clock(self) -> RolloutClock:
        """The seconds that a step waits for its rollout, and those of that rollout's parts, whenever it was played."""
        return self._clock

    def take(self, step: int) -> TrainingBatch:
        """The batch that begins after `step` steps; begins the next one of the run, with the present weights.

        Raises:
            AitrainError: what ended the play, on all ranks.
        """
        with self._clock.running("rollout"):
            if self._next is None or self._next[0] != step:
                self.settle()
                self.rollouts.load_weights()
                self._next = self._begin(step)
            batch = self._next[1].result()
        self._state, self._next = self.order.state(), None
        self._clock.add(batch.seconds)
        following = step + self.schedule.updates
        if self.index_of(following) < self.schedule.batches:
            self.rollouts.load_weights()
            self._next = self._begin(following)
        return batch

    def settle(self) -> None:
        """Wait until no batch is played; an error is raised by the next `take`."""
        if self._next is not None:
            wait([self._next[1]])

    def _begin(self, step: int) -> tuple[int, Future[TrainingBatch]]:
        """Begin to play a batch, with the weights that the engine has."""
        server = self.rollouts.server
        version = 0 if server is None else server.weight_version or 0
        rollouts = replace(self.rollouts, loads_weights=False, weight_version=lambda: version)

        def play() -> TrainingBatch:
            clock = self.rollouts.rollout.clock
            clock.take()  # held-out cases may have been played since the last batch
            batch = self.play(step, rollouts)
            parts = clock.take()
            batch.seconds = {"generate": parts["generate"], "environment": parts["environment"]}
            return batch

        return step, _in_thread(play)


def batch_source(
    runner: Runner,
    rollouts: PolicyRollouts,
    cases: CaseList,
    schedule: CaseSchedule,
    arguments: GRPOConfig,
) -> BatchSource:
    """The source of a run's batches, by its options."""
    config, order = runner.config, case_order(runner, cases, schedule.prompts, arguments)
    refill_limit = REFILLS if config.rl_sampling == "refill" else 0
    size, masks_truncated = arguments.num_generations, arguments.mask_truncated_completions
    source = AheadSource if config.rl_ahead else BatchSource
    return source(rollouts, cases, order, schedule, size, masks_truncated, refill_limit)


def _in_thread(work: Callable[[], TrainingBatch]) -> Future[TrainingBatch]:
    """The result of work that a thread does, which does not keep the process from ending."""
    future: Future[TrainingBatch] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="rollout ahead", daemon=True).start()
    return future


# -- the order of the cases


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

    def __post_init__(self) -> None:
        first = [0, *accumulate(order.cases for order in self.orders.values())]
        self._first = dict(zip(self.orders, first, strict=False))
        """The number of the first case of each environment."""
        self._env_of = [name for name, order in self.orders.items() for _ in range(order.cases)]

    def batch(self, index: int) -> list[int]:
        """As that of one environment. Group n of an environment with weight w is due at (n + 1/2) / w."""
        place, end = index * self.groups, (index + 1) * self.groups
        due = sorted(
            ((number + 0.5) / weight, name)
            for name, weight in zip(self.orders, self.weights, strict=True)
            for number in range(math.ceil(end * weight / sum(self.weights)) + len(self.orders))
        )
        names = [name for _, name in due[:end]]
        before, turns = names[:place], names[place:]
        drawn = {name: iter(one.take(before.count(name), turns.count(name))) for name, one in self.orders.items()}
        return [self._first[name] + next(drawn[name]) for name in turns]

    def others(self, replaced: Sequence[int], used: Collection[int]) -> Sequence[int | None]:
        """Another case of the same environment for each of the `replaced` ones, without those that are in use; None if
        that environment has none left."""
        found = list[int | None]()
        for case in replaced:
            name = self._env_of[case]
            first = self._first[name]
            in_use = {one - first for one in (*used, *found) if one is not None and self._env_of[one] == name}
            other = next(iter(self.orders[name].others([case - first], in_use)), None)
            found.append(None if other is None else first + other)
        return found

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
