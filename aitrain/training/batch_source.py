"""Generation batches of the trainer: their cases are chosen and played, when a batch is needed or beside the training
on the one before. With `--rl-sampling refill` groups of other cases replace those without advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.runner import Runner
from aitrain.rollout.clock import RolloutClock
from aitrain.training.case_order import CaseOrder, PlayedGroup, case_order
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import DiscardedEpisode, TrainingBatch, is_kept
from aitrain.training.zero_variance import has_advantages

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


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
    """How often groups of a batch are replaced at most."""
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
        """Make and play a batch; batches are played one after the other, in their order."""
        groups, accelerator = self.order.batch(self.index_of(step)), rollouts.accelerator
        share = len(groups) * self.group_size // accelerator.num_processes
        first = share * accelerator.process_index
        keys = [divmod(place, self.group_size) for place in range(first, first + share)]
        numbers = [groups[group] for group, _ in keys]
        batch = TrainingBatch(step, keys, numbers, [self.cases[number] for number in numbers])
        batch.dropped = batch.play(rollouts, range(share))
        if self.refill_limit or self.order.learns:
            table = self._groups(batch, rollouts, range(share), 0)
            if self.refill_limit:
                self._refill(batch, rollouts, table)
            self.order.see(table.values())
            batch.metrics |= self.order.metrics()
        return batch

    def _refill(self, batch: TrainingBatch, rollouts: PolicyRollouts, table: dict[int, _Group]) -> None:
        """Replace groups until all have advantages; those that replace others are entered into the table."""
        current, rounds = list(table), 0
        while rounds < self.refill_limit:
            flat = [group for group in current if not table[group].has_advantages]
            in_use = {group.case for group in table.values()}
            others = self.order.others([table[group].case for group in flat], in_use) if flat else []
            found = [(group, case) for group, case in zip(flat, others, strict=False) if case is not None]
            if not found:
                break
            rounds += 1
            new = {group: (number, case) for number, (group, case) in enumerate(found, len(table))}
            places = [place for place, (group, _) in enumerate(batch.keys) if group in new]
            for place in places:
                group, member = batch.keys[place]
                batch.discarded.append(DiscardedEpisode(batch.episodes[place], (group, member), table[group].round))
                number, case = new[group]
                batch.keys[place], batch.numbers[place] = (number, member), case
                batch.cases[place] = self.cases[case]
            batch.play(rollouts, places)
            table |= self._groups(batch, rollouts, places, rounds)
            current = [new[group][0] if group in new else group for group in current]
        batch.dropped = sum(table[group].dropped for group in current)
        discarded = [group for number, group in table.items() if number not in current]
        scores = [score for group in table.values() for score in group.scores]
        batch.metrics = {
            "cases/played_groups": float(len(table)),
            "cases/discarded_groups": float(len(discarded)),
            "cases/discarded_tokens": float(sum(group.tokens for group in discarded)),
            "cases/refill_rounds": float(rounds),
            **({"cases/mean_score": sum(scores) / len(scores)} if scores else {}),
        }

    def _groups(
        self, batch: TrainingBatch, rollouts: PolicyRollouts, places: Sequence[int], round: int
    ) -> dict[int, _Group]:
        """The groups of all ranks' episodes at their `places`, by their numbers."""
        own, groups = [], {}
        for place in places:
            one = batch.episodes[place]
            values = (one.result.score, is_kept(one, self.masks_truncated), one.trajectory.sampled_tokens)
            own.append((batch.keys[place], batch.numbers[place], *values, one.is_dropped))
        for group, rows in groupby(sorted(rollouts.gather(own)), key=lambda row: row[0][0]):
            _, numbers, scores, kept, tokens, dropped = zip(*rows, strict=True)
            tensor = torch.tensor([math.nan if score is None else score for score in scores])
            teaches = bool(has_advantages(tensor, torch.tensor(kept), len(kept)))
            known = tuple(score for score in scores if score is not None)
            groups[group] = _Group(numbers[0], known, teaches, sum(tokens), sum(dropped), round)
        return groups


@dataclass(frozen=True)
class _Group(PlayedGroup):
    """A group that was played, as all ranks know it."""

    has_advantages: bool
    tokens: int
    dropped: int
    round: int
    """0 for the batch's first groups."""


@dataclass
class AheadSource(BatchSource):
    """Plays each batch in a thread while the one before trains (--rl-ahead), with the weights before that training.

    Weights are written and loaded while the calling thread waits for it, and no batch is played or none of its
    completions runs. So a model is not read while it trains, and one thread at a time uses the
    training's process group.
    """

    loads_between_turns: bool = False
    """Whether weights are loaded into a batch that the training waits for (--rl-ahead-turns)."""
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
                self._begin(step)
            assert self._next is not None
            future = self._next[1]
            if self.loads_between_turns:
                self._load_between_turns(is_done=future.done())
            batch = future.result()
        self._state, self._next = self.order.state(), None
        self._clock.add(batch.seconds)
        following = step + self.schedule.updates
        if self.index_of(following) < self.schedule.batches:
            self.rollouts.load_weights()
            self._begin(following)
        return batch

    def settle(self) -> None:
        """Wait until no batch is played; an error is raised by the next `take`."""
        if self._next is not None:
            wait([self._next[1]])

    def _begin(self, step: int) -> None:
        """Begin to play a batch, with the weights that the engine has."""
        version = self.rollouts.server_version()
        rollouts = replace(self.rollouts, loads_weights=False, weight_version=lambda: version)

        def play() -> TrainingBatch:
            clock = self.rollouts.rollout.clock
            clock.take()  # held-out cases may have been played since the last batch
            batch = self.play(step, rollouts)
            parts = clock.take()
            batch.seconds = {"generate": parts["generate"], "environment": parts["environment"]}
            return batch

        self._next = step, _in_thread(play)

    def _load_between_turns(self, is_done: bool) -> None:
        """Load the present weights, if any rank still plays. The completions in flight end with the ones before."""
        rollouts, server = self.rollouts, self.rollouts.server
        accelerator = rollouts.accelerator
        plays = torch.tensor(int(not is_done), device=accelerator.device)
        if server is None or not accelerator.reduce(plays, reduction="sum").item():
            return
        rollouts.loop.run(server.gate.close())
        try:
            accelerator.wait_for_everyone()  # the completions of all ranks have ended
            rollouts.load_weights()
        finally:
            rollouts.loop.run(server.gate.open())


def batch_source(trainer: EpisodeTrainer, runner: Runner) -> BatchSource:
    """The source of a trainer's batches, by the options of the run."""
    config = runner.config
    parts = trainer.rollouts, trainer.cases, case_order(trainer, runner), trainer.schedule, trainer.num_generations
    refill_limit = config.rl_refill_limit if config.rl_sampling == "refill" else 0
    if config.rl_ahead:
        return AheadSource(*parts, trainer.masks_truncated, refill_limit, config.rl_ahead_turns)
    return BatchSource(*parts, trainer.masks_truncated, refill_limit)


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
