"""Which cases are sampled: groups that are replaced, and the order of several environments."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.environment.runner import start_runner
from aitrain.execution.failure import FailureCount
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.episode import Rollout
from aitrain.runs.held_out import Scoring
from aitrain.runs.records import RolloutRecord
from aitrain.training.batch_source import BatchSource, CaseOrder, CaseStream
from aitrain.training.evaluation import EvalPhase, EvalPlan, evaluate
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import TrainingBatch
from tests.rollout.scripted import Letters, Scripted

SIZE = 4
"""Episodes of a group."""


class InTurn(Scripted):
    """Answers 0 or 1 in turn, so that the members of a group have different answers."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")

    async def generate(self, request: GenerationRequest) -> Completion:
        self.answer = lambda _: f"{request.index % 2}$"
        return await super().generate(request)


class EveryFifth:
    """Only every fifth case is sometimes solved; of the others half always are, and case 7 fails."""

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx == 7:
            raise ValueError("seven")
        return float(completion) if case_idx % 5 == 0 else float(case_idx % 2)


def teaches(case: int) -> bool:
    return case % 5 == 0


class Ranks:
    """The accelerator and the `gather` of several ranks, which are threads."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier = count, threading.Barrier(count, timeout=20)
        self.lists: list[list[Any]] = [[] for _ in range(count)]

    def gather(self, rank: int) -> Callable[[list[Any]], list[Any]]:
        def gathered(own: list[Any]) -> list[Any]:
            self.lists[rank] = own
            self.barrier.wait()
            joined = [one for part in self.lists for one in part]
            self.barrier.wait()
            return joined

        return gathered

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns on each rank."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(work, range(self.count)))


def cases_of(count: int, env: str = "", first: int = 0) -> list[Case]:
    return [Case(number, f"{number}?", {}, first + number, env, first) for number in range(count)]


def order_of(cases: int, groups: int, seed: int = 1) -> CaseOrder:
    """The order of one environment's cases."""
    return CaseOrder({"": CaseStream(cases_of(cases), seed)}, groups)


def on_ranks(ranks: int, environment: object, work: Callable[[PolicyRollouts], Any]) -> list[Any]:
    """What `work` returns on each rank."""
    together = Ranks(ranks)

    def on_rank(rank: int) -> Any:
        runner = start_runner(environment, TrainConfig(rl_max_turns=9))
        rollout = Rollout(runner, InTurn(), ChatFormat(Letters()), None)
        accelerator: Any = SimpleNamespace(num_processes=ranks, process_index=rank)
        rollouts = PolicyRollouts(
            rollout, accelerator, 0, lambda _: None, FailureCount(), nullcontext, lambda: 0,
            gather=together.gather(rank),
        )  # fmt: skip
        with closing(runner), closing(rollouts):
            return work(rollouts)

    return together.run(on_rank)


def played(
    *,
    cases: int = 60,
    groups: int = 6,
    limit: int = 10,
    ranks: int = 1,
    environment: object = EveryFifth(),
    batches: int = 1,
) -> list[list[TrainingBatch]]:
    """The batches of each rank, with refill if there is a limit."""
    schedule = CaseSchedule(cases, groups, updates=1, epochs=1)

    def take(rollouts: PolicyRollouts) -> list[TrainingBatch]:
        source = BatchSource(rollouts, order_of(cases, groups), schedule, SIZE, refill_limit=limit)
        return [source.take(step) for step in range(batches)]

    return on_ranks(ranks, environment, take)


def episodes_of(batches: Sequence[TrainingBatch]) -> list[tuple[tuple[int, int], int, float | None]]:
    """Key, case and score of each episode of a batch, in the order of the ranks."""
    pairs = [(key, batch.own[key]) for batch in batches for key in batch.keys]
    return [(key, episode.case.number, episode.result.score) for key, episode in pairs]


def numbers_of(batch: TrainingBatch) -> list[int]:
    """The case of each episode."""
    return [episode.case.number for episode in batch.episodes]


def discarded_of(batch: TrainingBatch) -> list[tuple[int, int]]:
    """The keys of the episodes that are not trained on."""
    return [key for key in batch.own if key not in batch.keys]


# -- refill


def test_groups_without_advantages_are_replaced_by_the_next_cases_of_the_epoch() -> None:
    first, second = played(batches=2)[0]
    numbers = numbers_of(first)
    assert all(map(teaches, numbers))
    assert numbers == [number for number in numbers[::SIZE] for _ in range(SIZE)]
    metrics = first.metrics
    assert metrics["cases/played_groups"] == 6 + metrics["cases/discarded_groups"] == len(first.played) / SIZE
    scores = [one.score for one in first.played if one.score is not None]
    assert metrics["cases/mean_score"] == pytest.approx(fmean(scores))

    sampled = [episode.case.number for batch in (first, second) for episode in batch.own.values()]
    stream = [case.number for case in order_of(60, len(set(sampled))).batch()]
    assert Counter(sampled) == dict.fromkeys(stream, SIZE)

    records = first.records([0.5] * len(first.episodes))
    assert [record.advantage for record in records] == [0.5] * 24 + [None] * (len(first.own) - 24)
    rounds = [first.rounds[group] for group, _ in discarded_of(first)]
    assert [record.discarded for record in records] == [None] * 24 + rounds


def test_a_batch_keeps_what_it_has_when_the_limit_is_reached_or_no_other_case_is_left() -> None:
    (batch,) = played(limit=1)[0]
    assert set(batch.rounds) == {0, 1}
    assert {batch.rounds[group] for group, _ in discarded_of(batch)} == {0}
    assert not all(map(teaches, numbers_of(batch)))

    (small,) = played(cases=10, groups=4)[0]
    assert len(small.played) == 10 * SIZE, "each case once"
    assert sum(map(teaches, numbers_of(small))) == 2 * SIZE


def test_ranks_share_what_is_replaced_and_train_on_the_batch_of_one_rank() -> None:
    """Four ranks, so that groups are on two of them."""
    alone = played()[0]
    together = [batch for (batch,) in played(ranks=4)]

    assert episodes_of(together) == episodes_of(alone)
    assert {len(batch.episodes) for batch in together} == {24 // 4}
    everywhere = [(one.key, one.score) for one in together[2].everywhere]
    assert everywhere == [(key, score) for key, _, score in episodes_of(together)], "in the order of the ranks"
    assert all(batch.metrics == alone[0].metrics for batch in together)
    discarded = [key for batch in together for key in discarded_of(batch)]
    assert sorted(discarded) == sorted(discarded_of(alone[0]))


class Compared:
    """Scores an answer by its place in the group. The ranks of a test are threads, which share it."""

    concurrent = True

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def score_episode(self, completion: str) -> float | None:
        return None

    def score_group(self, texts: list[str], scores: list[float | None]) -> list[float]:
        assert scores == [None] * len(texts)
        self.groups.append(texts)
        return [place / len(texts) for place, _ in enumerate(texts)]


def test_a_group_is_scored_once_and_by_the_rank_that_has_it() -> None:
    environment = Compared()
    parts = played(limit=0, environment=environment, ranks=3)
    assert sorted(map(len, environment.groups)) == [SIZE] * 6
    assert [score for _, _, score in episodes_of([batch for (batch,) in parts])] == [0.0, 0.25, 0.5, 0.75] * 6


@pytest.mark.parametrize(("environment", "shares"), [(EveryFifth(), [3, 3, 2]), (Compared(), [8, 0, 0])])
def test_ranks_share_the_samples_of_a_held_out_case_unless_they_are_scored_together(
    environment: object, shares: list[int]
) -> None:
    plan = EvalPlan(list(cases_of(1)), samples=8, decodings=("sampled",))

    def evaluated(rollouts: PolicyRollouts) -> tuple[int, dict[str, Scoring]]:
        records = list[RolloutRecord]()
        scores = evaluate(rollouts, plan, EvalPhase("before", 0, 0), records.extend)
        return len(records), scores

    found = on_ranks(3, environment, evaluated)
    assert [count for count, _ in found] == shares
    assert len({str(scores) for _, scores in found}) == 1


# -- the cases of several environments

AT_ONCE = 6
SIZES = {"a": 10, "b": 7, "c": 5}


def order(weights: list[float]) -> CaseOrder:
    streams, first = dict[str, CaseStream](), 0
    for (name, size), weight in zip(SIZES.items(), weights, strict=False):
        streams[name] = CaseStream(cases_of(size, name, first), 3, weight)
        first += size
    return CaseOrder(streams, AT_ONCE)


def test_each_environment_has_its_share_at_any_time_to_within_a_group() -> None:
    source = random.Random(0)
    for _ in range(30):
        weights = [source.choice([1, 2, 3, source.uniform(0.05, 9)]) for _ in range(source.choice([2, 3]))]
        drawn = [case.env for mixed in [order(weights)] * 20 for case in mixed.batch()]
        counts = Counter[str]()
        for done, name in enumerate(drawn, 1):
            counts[name] += 1
            for other, weight in zip(SIZES, weights, strict=False):
                assert abs(counts[other] - done * weight / sum(weights)) < 1 + 1e-9


def test_each_environment_has_epochs_of_its_own() -> None:
    mixed = order([2, 1])
    of_a = [case.number for _ in range(5) for case in mixed.batch() if case.env == "a"]
    assert of_a == [case.number for case in order_of(10, 20, seed=3).batch()]


def test_a_group_is_replaced_by_one_of_its_environment_where_that_has_another_case() -> None:
    mixed = order([2, 1])
    of_a, of_b = (mixed.streams[name].cases for name in "ab")
    for in_use, expected in ([mixed.batch(), ["b", "a", "b", "a"]], [of_b, [None, "a", None, "a"]]):
        used, others = list(in_use), list[str | None]()
        for replaced in (of_b[0], of_a[0], of_b[1], of_a[1]):
            case = mixed.other(replaced, used)
            others.append(None if case is None else case.env)
            assert case not in used
            used += [] if case is None else [case]
        assert others == expected


def test_the_state_in_a_checkpoint_continues_the_order() -> None:
    mixed, later = order([2, 1]), order([2, 1])
    for case in mixed.batch()[:2]:
        mixed.other(case, ())
    later.restore(mixed.state())
    assert later.batch() == mixed.batch()
