"""Which cases are sampled: groups that are replaced, cases that become rare, and the user's own choice."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import EnvironmentFailed, Result, TrainConfig
from aitrain.environment.dataset import Cases
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import Limits
from aitrain.runs.run_folder import read_lines
from aitrain.training.batch_source import BatchPlace, BatchSource
from aitrain.training.case_order import CaseOrder, DifficultyOrder, PlayedGroup, UniformOrder
from aitrain.training.custom_order import CustomOrder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.refill import BatchCompletion, Refill
from aitrain.training.training_batch import TrainingBatch
from tests.rollout.scripted import END, Letters, Scripted
from tests.training.test_resume import as_if_killed_after, assert_same

Train = Callable[..., Result]
SIZE = 4
"""Episodes of a group."""


class BySeed(Scripted):
    """Answers 0 or 1 by the seed: consecutive seeds, those of a group, have different answers."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")

    async def generate(self, request: GenerationRequest) -> Completion:
        assert request.seed is not None
        self.answer = lambda _: f"{request.seed.seed % 2}$" if request.seed else ""
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


def dataset(count: int) -> Cases:
    return Cases([{"prompt": f"{number}?"} for number in range(count)], range(count))


def played(
    order: Callable[[], CaseOrder],
    *,
    cases: int = 60,
    groups: int = 6,
    limit: int = 10,
    ranks: int = 1,
    environment: object | None = None,
    batches: int = 1,
    sampled: list[int] | None = None,
    **options: Any,
) -> list[list[TrainingBatch]]:
    """The batches of each rank, with refill if there is a limit; `sampled` gets the completions of each rank."""
    together = Ranks(ranks)

    def on_rank(rank: int) -> list[TrainingBatch]:
        runner = start_runner(environment or EveryFifth(), TrainConfig(**options))
        engine = BySeed()
        rollout = Rollout(runner, engine, ChatFormat(Letters()), Limits(9, 99), END)
        accelerator: Any = SimpleNamespace(num_processes=ranks, process_index=rank)
        rollouts = PolicyRollouts(
            rollout, accelerator, 0, lambda _: None, FailureCount(), nullcontext, lambda: 0,
            gather=together.gather(rank),
        )  # fmt: skip
        chosen: Any = order()
        refill = Refill(chosen, limit, groups) if limit else None
        source = BatchSource(rollouts, dataset(cases), BatchCompletion(dataset(cases), chosen, False, refill), SIZE)
        share = groups * SIZE // ranks
        own = slice(share * rank, share * (rank + 1))
        with closing(runner), closing(rollouts):
            places = [BatchPlace(index, index, range(own.start, own.stop), own) for index in range(batches)]
            taken = [source.take(place) for place in places]
        if sampled is not None:
            sampled[rank] = len(engine.requests)
        return taken

    return together.run(on_rank)  # type: ignore[no-any-return]


def episodes_of(batches: Sequence[TrainingBatch]) -> list[tuple[tuple[int, int], int, float | None]]:
    """Key, case and score of each episode of a batch, in the order of the ranks."""
    return [
        (key, number, episode.result.score)
        for batch in batches
        for key, number, episode in zip(batch.keys, batch.numbers, batch.episodes, strict=True)
    ]


# -- refill


def test_groups_without_advantages_are_replaced_until_the_batch_is_full() -> None:
    (batch,) = played(lambda: UniformOrder(60, 6, 1))[0]
    groups = [batch.keys[at : at + SIZE] for at in range(0, len(batch.keys), SIZE)]

    assert len(groups) == 6
    for group, numbers in zip(groups, (batch.numbers[at : at + SIZE] for at in range(0, 24, SIZE)), strict=True):
        assert group == [(group[0][0], member) for member in range(SIZE)]
        assert len(set(numbers)) == 1
        assert teaches(numbers[0])
    assert [episode.case.number for episode in batch.episodes] == batch.numbers == [c.number for c in batch.cases]
    assert not any(teaches(one.episode.case.number) for one in batch.discarded)
    assert len({one.key for one in batch.discarded} | {*batch.keys}) == len(batch.played)
    metrics = batch.metrics
    assert metrics["cases/played_groups"] == 6 + metrics["cases/discarded_groups"] == len(batch.played) / SIZE
    assert metrics["cases/discarded_tokens"] == 2 * len(batch.discarded)
    assert metrics["cases/refill_rounds"] == 1 + max(one.round for one in batch.discarded) > 2


def test_the_cases_that_replace_others_are_the_next_ones_of_the_epoch() -> None:
    first, second = played(lambda: UniformOrder(60, 6, 1), batches=2)[0]
    sampled = [one.episode.case.number for batch in (first, second) for one in batch.discarded]
    sampled += [*first.numbers, *second.numbers]
    count = len(set(sampled))
    stream = UniformOrder(60, count, 1).batch(0)
    assert Counter(sampled) == dict.fromkeys(stream, SIZE)


def test_a_batch_keeps_what_it_has_when_the_limit_is_reached_or_no_other_case_is_left() -> None:
    (batch,) = played(lambda: UniformOrder(60, 6, 1), limit=1)[0]
    assert {one.round for one in batch.discarded} == {0}
    assert not all(map(teaches, batch.numbers))

    (small,) = played(lambda: UniformOrder(10, 4, 1), cases=10, groups=4)[0]
    assert len(small.played) == 10 * SIZE, "each case once"
    assert sum(map(teaches, small.numbers)) == 2 * SIZE


def test_ranks_share_what_is_replaced_and_train_on_the_batch_of_one_rank() -> None:
    """Four ranks, so that groups are on two of them."""
    ranks = 4
    alone = played(lambda: UniformOrder(60, 6, 1))[0]
    sampled = [0] * ranks
    together = [batch for (batch,) in played(lambda: UniformOrder(60, 6, 1), ranks=ranks, sampled=sampled)]
    metrics = alone[0].metrics

    assert episodes_of(together) == episodes_of(alone)
    assert {len(batch.episodes) for batch in together} == {24 // ranks}
    assert len({json.dumps(batch.metrics) for batch in (*together, *alone)}) == 1
    discarded = [one.key for batch in together for one in batch.discarded]
    assert sorted(discarded) == sorted(one.key for one in alone[0].discarded)
    assert max(sampled) - min(sampled) <= SIZE * metrics["cases/refill_rounds"]


def test_discarded_episodes_are_recorded_and_marked() -> None:
    (batch,) = played(lambda: UniformOrder(60, 6, 1))[0]
    records = batch.records([0.5] * len(batch.episodes))
    marked = [record for record in records if record.discarded is not None]
    assert len(marked) == len(batch.discarded) > 0
    assert {record.advantage for record in marked} == {None}
    assert {record.to_json().get("discarded") for record in records[:24]} == {None}
    assert len({(record.group, record.case_idx) for record in records}) == len(records) / SIZE


# -- difficulty


def groups_of(case: int, *scores: float) -> list[PlayedGroup]:
    return [PlayedGroup(case, scores)]


def test_a_case_becomes_rare_when_its_scores_stop_to_vary_and_common_when_they_vary_again() -> None:
    order = DifficultyOrder(5, 2, 0, (-1.0, 1.0))
    assert order.weight(0) == 1.0
    for _ in range(4):
        order.see([*groups_of(0, -1, -1, -1, -1), *groups_of(1, 1, 1, 1, 1), *groups_of(2, 0.2, 0.2, 0.2, 0.2)])
        order.see([*groups_of(3, 1, -1, 1, -1), *groups_of(4)])
    assert max(order.weight(case) for case in (0, 1, 2)) < 0.02
    assert order.weight(3) == pytest.approx(1.0)
    assert order.weight(4) < 0.5, "without scores nothing is learned"
    order.see(groups_of(0, -1, -1, -1, 1))
    assert order.weight(0) > 0.4


def test_rare_cases_do_not_disappear_and_no_batch_has_a_case_twice() -> None:
    order = DifficultyOrder(50, 8, 0, (0.0, 1.0))
    for case in range(40):
        order.see([*groups_of(case, 0, 0, 0, 0)] * 5)
    batches = [order.batch(index) for index in range(400)]
    drawn = Counter(case for batch in batches for case in batch)
    assert all(len(set(batch)) == 8 for batch in batches)
    assert drawn.keys() == set(range(50))
    assert sum(drawn[case] for case in range(40)) < 0.35 * 3200
    assert Counter(DifficultyOrder(3, 7, 0, (0.0, 1.0)).batch(0)).most_common()[-1][1] == 2, "fewer cases than groups"


def test_difficulty_draws_mostly_cases_that_teach_on_all_ranks_alike() -> None:
    batches = played(lambda: DifficultyOrder(60, 6, 1, (0.0, 1.0)), limit=0, batches=60, ranks=2)
    numbers = [[case for one in batches for case in one[index].numbers] for index in range(60)]
    assert all(len(row) == 24 for row in numbers)
    early, late = ([case for row in rows for case in row] for rows in (numbers[:5], numbers[-15:]))
    assert sum(map(teaches, early)) / len(early) < 0.4
    assert sum(map(teaches, late)) / len(late) > 0.5
    assert batches[0][-1].metrics["cases/mean_weight"] < 0.5
    assert batches[0][0].metrics["cases/played"] == 0.1
    assert [batch.metrics for batch in batches[0]] == [batch.metrics for batch in batches[-1]]


ORDERS: list[Callable[[], CaseOrder]] = [
    lambda: UniformOrder(30, 4, 5),
    lambda: DifficultyOrder(30, 4, 5, (0.0, 1.0)),
    lambda: CustomOrder(hardest_first, dataset(30), 4, 5, list, is_first=True),
]


def hardest_first(count: int, scores: Sequence[Sequence[float]], random: random.Random) -> list[int]:
    means = [sum(row) / len(row) if row else random.random() for row in scores]
    return sorted(range(len(scores)), key=means.__getitem__)[:count]


@pytest.mark.parametrize("make", ORDERS)
def test_an_order_that_is_restored_chooses_what_it_would_have_chosen(make: Callable[[], Any]) -> None:
    def step(order: Any, index: int) -> list[int]:
        chosen: list[int] = order.batch(index)
        if not isinstance(order, DifficultyOrder):
            chosen = [*chosen, *order.others(chosen[:2], set(chosen))]
        order.see([PlayedGroup(case, (case / 30, index % 2)) for case in chosen])
        return chosen

    order = make()
    for index in range(7):
        step(order, index)
    state = json.loads(json.dumps(order.state()))
    later = make()
    later.restore(state)
    assert [step(later, index) for index in range(7, 12)] == [step(order, index) for index in range(7, 12)]


# -- the user's own choice


def test_a_sampler_gets_what_it_names_and_all_ranks_follow_the_first() -> None:
    asked = []

    def sampler(cases: Sequence[Any], count: int, scores: Sequence[Any], batch: int) -> list[int]:
        asked.append((len(cases), cases[3]["prompt"], count, [list(row) for row in scores[:2]], batch))
        return [0, 1, 5, 10][:count]

    def order() -> CaseOrder:
        rank = len(made)
        made.append(rank)
        return CustomOrder(sampler, dataset(60), 4, 0, together.gather(rank), is_first=rank == 0)

    together, made = Ranks(1), list[int]()
    played(order, groups=4, limit=0, batches=2)
    assert asked == [(60, "3?", 4, [[], []], 0), (60, "3?", 4, [[0.5], [1.0]], 1)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [([1], "returned 1 case numbers, and not count=2"), ([0, 9], "returned 9, and cases are numbered 0 to 3")],
)  # fmt: skip
def test_a_wrong_answer_of_a_sampler_is_one_sentence_on_all_ranks(answer: object, message: str) -> None:
    ranks = Ranks(2)

    def ask(rank: int) -> str:
        order = CustomOrder(lambda: answer, dataset(4), 2, 0, ranks.gather(rank), is_first=rank == 0)
        with pytest.raises(EnvironmentFailed) as caught:
            order.batch(0)
        return str(caught.value)

    first, second = ranks.run(ask)
    assert first == second
    assert message in first


# -- real trainings


class Letters7:
    """Cases 0 to 3 have scores that vary; the others have none, or always the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return self.build_dataset()[:2]

    def score_episode(self, completion: str, case_idx: int) -> float | None:
        if case_idx == 11:
            return None
        return sum(letter < "n" for letter in completion) / max(1, len(completion)) if case_idx < 4 else case_idx % 2


LONG = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None, "rl_num_generations": 4}


@pytest.mark.parametrize(
    "options",
    [
        {"rl_sampling": "refill", "rl_refill_limit": 2, "trl": {"steps_per_generation": 8}},
        pytest.param({"rl_sampling": "difficulty", "batch_size": 4}, marks=pytest.mark.slow),
    ],
    ids=["refill, inside a window", "difficulty"],
)
@pytest.mark.slow
def test_a_resumed_run_samples_the_same_cases(options: dict[str, Any], train: Train) -> None:
    options = {**LONG, **options}
    whole = train(Letters7(), project_name="whole", **options)
    killed = as_if_killed_after(whole.folder, 3, "killed")
    train(Letters7(), project_name="killed", resume_from_checkpoint="auto", **options)
    assert_same(killed, whole.folder)

    lines = [line for line in whole.history if "reward" in line]
    records = [r for file in whole.folder.glob("rollouts/*.jsonl") for r in read_lines(file) if "eval_phase" not in r]
    discarded = [record for record in records if "discarded" in record]
    if options["rl_sampling"] == "refill":
        assert discarded
        assert sum(line.get("cases/discarded_tokens", 0) for line in lines) == sum(r["tokens"] for r in discarded)
    else:
        assert not discarded
        assert lines[-1]["cases/played"] > 0
