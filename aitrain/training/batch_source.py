"""Generation batches of the trainer: their cases are chosen and played, when a batch is needed or beside the training
on the one before. With `--rl-sampling refill` groups of other cases replace those without advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch
from trl import GRPOConfig

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.runner import Runner
from aitrain.rollout.clock import RolloutClock
from aitrain.training.case_order import CaseOrder, case_order
from aitrain.training.holdout import CaseList
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import DiscardedEpisode, PlayedEpisode, TrainingBatch, finish_groups
from aitrain.training.zero_variance import has_advantages


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
        """Make and play a batch; batches are played one after the other, in their order. Groups without advantages are
        replaced until all have some, at most `refill_limit` times."""
        cases, accelerator = self.order.batch(self.index_of(step)), rollouts.accelerator
        share = len(cases) * self.group_size // accelerator.num_processes
        first = share * accelerator.process_index
        keys = [divmod(place, self.group_size) for place in range(first, first + share)]
        batch = TrainingBatch(step, keys, [cases[group] for group, _ in keys])
        batch.weight_version = rollouts.weight_version()
        groups = self._play(batch, rollouts, range(share))
        current, rounds = list(groups), dict.fromkeys(groups, 0)
        for round in range(1, self.refill_limit + 1):
            flat = [group for group in current if not self._teaches(groups[group])]
            in_use = {members[0].number for members in groups.values()}
            others = self.order.others([groups[group][0].number for group in flat], in_use) if flat else []
            found = [(group, case) for group, case in zip(flat, others, strict=False) if case is not None]
            if not found:
                break
            new = {group: (number, case) for number, (group, case) in enumerate(found, len(groups))}
            places = [place for place, (group, _) in enumerate(batch.keys) if group in new]
            for place in places:
                group, member = batch.keys[place]
                batch.discarded.append(DiscardedEpisode(batch.episodes[place], (group, member), rounds[group]))
                number, batch.numbers[place] = new[group]
                batch.keys[place] = number, member
            played = self._play(batch, rollouts, places)
            groups, rounds = groups | played, rounds | dict.fromkeys(played, round)
            current = [new[group][0] if group in new else group for group in current]
        batch.everywhere = [one for group in current for one in groups[group]]
        batch.played = [one for members in groups.values() for one in members]
        if self.refill_limit:
            known = [one.score for one in batch.played if one.score is not None]
            discarded_tokens = sum(one.tokens for one in batch.played) - sum(one.tokens for one in batch.everywhere)
            batch.metrics = {
                "cases/played_groups": float(len(groups)),
                "cases/discarded_groups": float(len(groups) - len(current)),
                "cases/discarded_tokens": float(discarded_tokens),
                "cases/refill_rounds": float(max(rounds.values())),
                **({"cases/mean_score": sum(known) / len(known)} if known else {}),
            }
        return batch

    def _play(
        self, batch: TrainingBatch, rollouts: PolicyRollouts, places: Sequence[int]
    ) -> dict[int, list[PlayedEpisode]]:
        """Play this rank's episodes at these places, also once more if their cases have changed; returns the groups of
        all ranks. The episodes of a group have consecutive sampling seeds, and one environment seed."""
        most = max(rollouts.gather([len(places)]))  # all ranks play as many times, as they may generate together
        at_once = (rollouts.rollout.runner.episodes_at_once if batch.episodes else None) or most
        for start in range(0, most, at_once):
            part, cases, env_seeds, sampling_seeds = places[start : start + at_once], list[Case](), [], []
            for place in part:
                number, (group, member) = batch.numbers[place], batch.keys[place]
                cases.append(self.cases[number])
                env_seeds.append(rollouts.env_seed(batch.step, number))
                sampling_seeds.append(rollouts.sampling_seed(batch.step, number, group) + member)
            for place, episode in zip(part, rollouts.play(cases, env_seeds, sampling_seeds), strict=True):
                batch.episodes[place : place + 1] = [episode]
        keys, episodes = [batch.keys[place] for place in places], [batch.episodes[place] for place in places]
        finish_groups(rollouts, episodes, keys)
        numbers = [batch.numbers[place] for place in places]
        groups: dict[int, list[PlayedEpisode]] = {}
        own = list(map(PlayedEpisode.of, keys, numbers, episodes))
        for one in sorted(rollouts.gather(own), key=lambda one: one.key):
            groups.setdefault(one.key[0], []).append(one)
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
                self._begin(step)
            assert self._next is not None
            batch = self._next[1].result()
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


def batch_source(
    runner: Runner,
    rollouts: PolicyRollouts,
    cases: CaseList,
    schedule: CaseSchedule,
    arguments: GRPOConfig,
) -> BatchSource:
    """The source of a run's batches, by its options."""
    config, order = runner.config, case_order(runner, cases, schedule.prompts, arguments)
    refill_limit = config.rl_refill_limit if config.rl_sampling == "refill" else 0
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
