"""Generation batches of the trainer: their cases are chosen and played, when a batch is needed or beside the training
on the one before. With `--rl-sampling refill` groups of other cases replace those without advantages.

Epochs are one stream of cases: each uses each case once, even if its last step is incomplete. TRL drops the last
incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees the whole run as one
epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from trl import GRPOConfig

from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.runner import Runner
from aitrain.rollout.episode import Episode
from aitrain.training.algorithm import has_advantages
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import MemberKey, PlayedEpisode, TrainingBatch, finish

REFILLS = 10
"""How often groups of a batch are replaced at most, with `--rl-sampling refill`."""


@dataclass
class BatchSource:
    """Makes and plays generation batches in order. Every rank must call its methods together."""

    rollouts: PolicyRollouts
    order: CaseOrder
    schedule: CaseSchedule
    group_size: int
    refill_limit: int = 0
    state: dict[str, list[int]] = field(init=False)
    """State of `order` after the last batch that was taken; a resumed run samples a batch that was ahead again."""

    def __post_init__(self) -> None:
        self.state = self.order.state()

    def restore(self, state: dict[str, list[int]]) -> None:
        """Continue with the `state` of an earlier process."""
        self.order.restore(state)
        self.state = state

    def take(self, step: int) -> TrainingBatch:
        """The next batch, which begins after `step` optimizer steps, played."""
        batch = self.play(step, self.rollouts)
        self.state = self.order.state()
        return batch

    def play(self, step: int, rollouts: PolicyRollouts) -> TrainingBatch:
        """Make and play the next batch. Groups without advantages are replaced until all have some, at most
        `refill_limit` times."""
        cases = self.order.batch()  # of each group
        groups, rounds = list(range(len(cases))), list[int]()  # those that are trained on, and the round of each one
        share = len(cases) * self.group_size // rollouts.accelerator.num_processes
        first, version = share * rollouts.accelerator.process_index, rollouts.weight_version()

        def own_keys() -> list[MemberKey]:
            places = (divmod(place, self.group_size) for place in range(first, first + share))
            return [(groups[place], member) for place, member in places]

        own, members = dict[MemberKey, Episode](), defaultdict[int, list[PlayedEpisode]](list)
        for round in range(1 + self.refill_limit):
            new = range(len(rounds), len(cases))
            if not new:
                break
            rounds += [round] * len(new)
            keys = [key for key in own_keys() if key[0] in new]
            played = dict(zip(keys, rollouts.play([cases[group] for group, _ in keys], step, keys), strict=True))
            own |= played
            for one in finish(rollouts, played):
                members[one.key[0]].append(one)
            if round < self.refill_limit:
                self._replace(groups, cases, members)
        batch = TrainingBatch(
            step,
            own_keys(),
            own,
            rounds,
            everywhere=[one for group in groups for one in members[group]],
            played=[one for group in members.values() for one in group],
            weight_version=version,
        )
        if self.refill_limit:
            known = [one.score for one in batch.played if one.score is not None]
            batch.metrics = {
                "cases/played_groups": float(len(cases)),
                "cases/discarded_groups": float(len(cases) - len(groups)),
                **({"cases/mean_score": sum(known) / len(known)} if known else {}),
            }
        return batch

    def _replace(self, groups: list[int], cases: list[Case], members: Mapping[int, Sequence[PlayedEpisode]]) -> None:
        """Put groups of other cases in the place of those without advantages."""
        rows = [one for group in groups for one in members[group]]
        scores = torch.tensor([math.nan if one.score is None else one.score for one in rows])
        is_kept = torch.tensor([one.is_kept for one in rows])
        teaches = has_advantages(scores, is_kept, self.group_size).tolist()
        for place in [place for place, has_some in enumerate(teaches) if not has_some]:
            if (case := self.order.other(cases[groups[place]], cases)) is not None:
                groups[place] = len(cases)
                cases.append(case)


@dataclass
class AheadSource(BatchSource):
    """Plays each batch in a thread while the one before trains (--rl-ahead), with the weights before that training.

    Weights are written and loaded when no batch is played. So a model is not read while it trains, and one thread at a
    time uses the training's process group.
    """

    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "rollout ahead"), init=False)
    _next: Future[TrainingBatch] | None = field(default=None, init=False)
    """The batch that is played ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rollouts.settle = self.settle

    def take(self, step: int) -> TrainingBatch:
        """The batch that begins after `step` steps; begins the next one of the run, with the present weights.

        Raises:
            AitrainError: what ended the play, on all ranks.
        """
        batch = (self._next or self._begin(step)).result()
        self.state, self._next = self.order.state(), None
        following = step + self.schedule.updates
        if following < self.schedule.steps:
            self._next = self._begin(following)
        return batch

    def settle(self) -> None:
        """Wait until no batch is played; an error is raised by the next `take`."""
        if self._next is not None:
            wait([self._next])

    def _begin(self, step: int) -> Future[TrainingBatch]:
        """Begin to play the next batch, with the present weights."""
        self.rollouts.load_weights()
        version = self.rollouts.weight_version()
        rollouts = replace(self.rollouts, loads_weights=False, weight_version=lambda: version)
        return self._thread.submit(self.play, step, rollouts)


# -- the order of the cases


@dataclass
class CaseStream:
    """The cases of one environment, in the order in which they are drawn. Each epoch has each case once."""

    cases: Sequence[Case]
    """Those of one epoch."""
    seed: int | None = None
    """Each epoch is shuffled with it, in the order of TRL's sampler; None: the order of the dataset."""
    weight: float = 1.0
    """The environment's share of the groups, in proportion to the others'."""
    groups: int = 0
    """Groups drawn so far, without replacements (refill)."""
    drawn: int = 0
    """Cases that were drawn so far."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed or 0)
        self._epochs: list[torch.Tensor] = []

    def draw(self) -> Case:
        """The next case."""
        epoch, place = divmod(self.drawn, len(self.cases))
        self.drawn += 1
        if self.seed is not None:
            while len(self._epochs) <= epoch:
                self._epochs.append(torch.randperm(len(self.cases), generator=self._generator))
            place = int(self._epochs[epoch][place])
        return self.cases[place]


@dataclass
class CaseOrder:
    """The order of a run's cases: at any time each environment has had its share of all groups so far, to within a
    group (two with more than four environments). A batch may hold the last cases of one epoch and the first of the
    next.

    All ranks make the same calls and get the same answers, and a resumed run, which restores `state`, makes those that
    it would have made.
    """

    streams: Mapping[str, CaseStream]
    """Case streams by name of the environment."""
    groups: int
    """Groups of a batch, over all ranks."""

    def batch(self) -> list[Case]:
        """The case of each group of the next batch. Group n of an environment with weight w is due at (n + 1/2) / w."""
        cases = list[Case]()
        for _ in range(self.groups):
            _, name = min(((one.groups + 0.5) / one.weight, name) for name, one in self.streams.items())
            self.streams[name].groups += 1
            cases.append(self.streams[name].draw())
        return cases

    def other(self, replaced: Case, used: Iterable[Case]) -> Case | None:
        """The next case of the same environment that is not in use; None if all are."""
        stream, numbers = self.streams[replaced.env], {case.number for case in used if case.env == replaced.env}
        if len(numbers) == len(stream.cases):
            return None
        while (case := stream.draw()).number in numbers:
            pass
        return case

    def state(self) -> dict[str, list[int]]:
        """What a checkpoint holds: how many groups and cases were drawn, by environment."""
        return {name: [one.groups, one.drawn] for name, one in self.streams.items()}

    def restore(self, state: Mapping[str, list[int]]) -> None:
        """Continue with the `state` of an earlier process."""
        for name in self.streams.keys() & state.keys():
            self.streams[name].groups, self.streams[name].drawn = state[name]


def batch_source(
    runner: Runner,
    rollouts: PolicyRollouts,
    cases: Sequence[Case],
    schedule: CaseSchedule,
    arguments: GRPOConfig,
) -> BatchSource:
    """The source of a run's batches, by its options."""
    config, seed = runner.config, arguments.seed if arguments.shuffle_dataset else None
    by_env = defaultdict[str, list[Case]](list)
    for case in cases:
        by_env[case.env].append(case)
    streams = {env: CaseStream(own, seed, config.env_shares[env]) for env, own in by_env.items()}
    source = AheadSource if config.rl_ahead else BatchSource
    refills = REFILLS if config.rl_sampling == "refill" else 0
    order = CaseOrder(streams, schedule.prompts)
    return source(rollouts, order, schedule, arguments.num_generations, refills)
