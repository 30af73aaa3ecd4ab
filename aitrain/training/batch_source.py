"""Generation batches of the trainer: each is played when it is needed, or beside the training on the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from threading import Thread

import torch

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.options.train import TrainConfig
from aitrain.rollout.clock import RolloutClock
from aitrain.runs.json_values import JsonObject
from aitrain.training.case_order import CaseOrder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.refill import BatchCompletion
from aitrain.training.training_batch import TrainingBatch


@dataclass(frozen=True)
class BatchPlace:
    """A generation batch's place in the run, and this rank's share of it."""

    index: int
    """Number of the batch, counted from the beginning of the run."""
    step: int
    """Optimizer steps before the one that trains on it first."""
    places: range
    """Indices of this rank's episodes among all episodes of the batch."""


@dataclass(frozen=True)
class BatchPlaces:
    """Places of all generation batches of a run, for one rank."""

    schedule: CaseSchedule
    count: int
    """This rank's episodes in a batch."""
    rank: int

    def at(self, step: int) -> BatchPlace:
        """The place of the batch that begins in a step, or of the next one, if none does."""
        first = self.count * self.rank
        return BatchPlace(-(-step // self.schedule.updates), step, range(first, first + self.count))

    def after(self, place: BatchPlace) -> BatchPlace | None:
        """The place of the next batch of the run; None after the last one."""
        following = self.at(place.step + self.schedule.updates)
        return following if following.index < self.schedule.batches else None


@dataclass
class BatchSource:
    """Makes and plays generation batches in order. Every rank must call its methods together."""

    rollouts: PolicyRollouts
    cases: Sequence[Case]
    completion: BatchCompletion
    group_size: int
    _state: JsonObject | None = field(default=None, init=False)

    @property
    def clock(self) -> RolloutClock:
        """The clock that has the seconds of each step's rollout."""
        return self.rollouts.rollout.clock

    def take(self, place: BatchPlace) -> TrainingBatch:
        """The batch at this place, played."""
        batch = self.play(place, self.rollouts)
        self._state = self.order.state()
        return batch

    def play(self, place: BatchPlace, rollouts: PolicyRollouts) -> TrainingBatch:
        """Make and play a batch; batches are played one after the other, in their order."""
        batch = self.made(place)
        batch.play(rollouts)
        self.completion.complete(batch, rollouts)
        return batch

    @property
    def order(self) -> CaseOrder:
        """Chooses the cases of the batches."""
        return self.completion.order

    def order_state(self) -> JsonObject:
        """The state of the order after the last batch that was taken: a resumed run samples a later one again."""
        return self.order.state() if self._state is None else self._state

    def made(self, place: BatchPlace) -> TrainingBatch:
        """The batch at this place, without episodes."""
        everywhere = [number for number in self.order.batch(place.index) for _ in range(self.group_size)]
        numbers = everywhere[place.places.start : place.places.stop]
        cases = [self.cases[number] for number in numbers]
        return TrainingBatch(place.step, place.places, self.group_size, numbers, cases, index=place.index)


@dataclass
class AheadSource(BatchSource):
    """Plays each batch in a thread while the one before trains (--rl-ahead), with the weights before that training.

    Weights are written and loaded while the calling thread waits for it, and no batch is played or none of its
    completions runs. So a model is not read while it trains, and one thread at a time uses the
    training's process group.
    """

    places: BatchPlaces
    loads_between_turns: bool = False
    """Whether weights are loaded into a batch that the training waits for (--rl-ahead-turns)."""
    _next: tuple[tuple[int, int], Future[TrainingBatch]] | None = field(default=None, init=False)
    """Index and step of the batch that is played ahead, and its result."""
    _clock: RolloutClock = field(default_factory=RolloutClock, init=False)

    def __post_init__(self) -> None:
        self.rollouts.settle = self.settle

    @property
    def clock(self) -> RolloutClock:
        """The seconds that a step waits for its rollout, and those of that rollout's parts, whenever it was played."""
        return self._clock

    def take(self, place: BatchPlace) -> TrainingBatch:
        """The batch at this place, played; begins the next one, with the present weights.

        Raises:
            AitrainError: what ended the play, on all ranks.
        """
        with self._clock.running("rollout"):
            batch = self._finished(place)
        self._state = self.order.state()
        self._clock.add(batch.seconds)
        following = self.places.after(place)
        if following is not None:
            self.rollouts.load_weights()
        self._next = None if following is None else self._begun(following)
        return batch

    def settle(self) -> None:
        """Wait until no batch is played; an error is raised by the next `take`."""
        if self._next is not None:
            wait([self._next[1]])

    def _finished(self, place: BatchPlace) -> TrainingBatch:
        if self._next is None or self._next[0] != (place.index, place.step):
            self.settle()
            self.rollouts.load_weights()
            self._next = self._begun(place)
        future = self._next[1]
        if self.loads_between_turns:
            self._load_between_turns(is_done=future.done())
        return future.result()

    def _begun(self, place: BatchPlace) -> tuple[tuple[int, int], Future[TrainingBatch]]:
        rollouts = self._beside

        def play() -> TrainingBatch:
            clock = self.rollouts.rollout.clock
            clock.take()  # held-out cases may have been played since the last batch
            batch = self.play(place, rollouts)
            parts = clock.take()
            batch.seconds = {"generate": parts["generate"], "environment": parts["environment"]}
            return batch

        return (place.index, place.step), in_thread(play)

    @property
    def _beside(self) -> PolicyRollouts:
        """The rollouts as the thread uses them: with the weights that the engine has, and loading none."""
        version = self.rollouts.server_version()
        return replace(self.rollouts, loads_weights=False, weight_version=lambda: version)

    def _load_between_turns(self, is_done: bool) -> None:
        """Load the present weights, if any rank still plays. The completions in flight end with the ones before."""
        rollouts, server = self.rollouts, self.rollouts.server
        accelerator = rollouts.accelerator
        plays = torch.tensor(int(not is_done), device=accelerator.device)
        if server is None or not accelerator.reduce(plays, reduction="sum").item():
            return
        rollouts.loop.run(server.gate.close())
        try:
            rollouts.loop.run(server.fleet.settle())  # no server that returns gets files that are removed
            accelerator.wait_for_everyone()  # the completions of all ranks have ended
            rollouts.load_weights()
        finally:
            rollouts.loop.run(server.gate.open())


def batch_source(config: TrainConfig, source: BatchSource, places: BatchPlaces) -> BatchSource:
    """The source of a run's batches: the given one, or one that plays them ahead (--rl-ahead)."""
    if not config.rl_ahead:
        return source
    parts = source.rollouts, source.cases, source.completion, source.group_size
    return AheadSource(*parts, places, config.rl_ahead_turns)


def in_thread(work: Callable[[], TrainingBatch]) -> Future[TrainingBatch]:
    """The result of work that a thread does, which does not keep the process from ending."""
    future: Future[TrainingBatch] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="rollout ahead", daemon=True).start()
    return future
