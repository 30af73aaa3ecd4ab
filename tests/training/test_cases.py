"""Which cases are trained on: each once an epoch, however they are cut into steps, and none that is held out or looks
the same to the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.batch import CaseSchedule
from aitrain.environment.contract import Case
from aitrain.rollout.chat_format import ChatFormat
from aitrain.runs.run_folder import RunFolder
from aitrain.training.batch_source import CaseOrder, CaseStream
from aitrain.training.holdout import DatasetSplit, PromptLimit, split
from aitrain.training.model import load_tokenizer
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, rollouts
from tests.training.test_case_sampling import cases_of


@pytest.mark.parametrize(("cases", "prompts", "epochs"), [(10, 4, 1), (7, 4, 3), (8, 4, 2), (3, 4, 5), (5, 12, 1)])
def test_every_epoch_uses_every_case_once(cases: int, prompts: int, epochs: int) -> None:
    plan = CaseSchedule(cases, prompts, 1, epochs)
    stream = CaseOrder({"": CaseStream(cases_of(cases), seed=3)}, prompts)
    order = [case.number for _ in range(plan.batches) for case in stream.batch()]
    assert plan.steps == -(-cases * epochs // prompts)
    assert len(order) == plan.steps * prompts
    for epoch in range(epochs):
        assert Counter(order[epoch * cases : (epoch + 1) * cases]) == Counter(range(cases))


def test_an_epoch_ends_with_the_last_step_on_the_batch_that_has_its_last_case() -> None:
    plan = CaseSchedule(cases=10, prompts=4, updates=2, epochs=3)
    assert [step for step in range(1, plan.steps + 1) if plan.ends_epoch(step)] == [6, 10, 16]
    assert plan.epochs_after(plan.steps) == 3


# -- runs

LEFTOVERS: dict[str, Any] = {
    "max_steps": None, "epochs": 3, "rl_prompts_per_step": 4, "batch_size": 8, "rl_num_generations": 2, "eval_cases": 2,
    "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": None, "rl_max_new_tokens": 4,
}  # fmt: skip
"""10 cases in steps of 4: epochs end after steps 3, 5 and 8."""


def test_a_run_trains_on_the_leftover_cases_of_each_epoch_and_counts_saves_and_scores_where_epochs_end(
    train: Train,
) -> None:
    result = train(Vowels(10), **LEFTOVERS)
    seen = [record["case_idx"] for record in rollouts(result)][::2]  # one of each group
    assert [Counter(seen[n : n + 10]) for n in (0, 10, 20)] == [Counter(range(10))] * 3
    assert (result.steps, len(seen)) == (8, 32)
    epochs = [line["epoch"] for line in result.history if "loss" in line]
    assert epochs == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.0])
    assert [line["step"] for line in result.history if "eval_score" in line] == [3, 5]
    names = sorted(path.name for path in RunFolder(result.folder).checkpoints.iterdir())
    assert names == ["checkpoint-3", "checkpoint-5", "checkpoint-8"]


# -- held-out cases


@pytest.fixture(scope="module")
def limit() -> PromptLimit:
    return PromptLimit(ChatFormat(load_tokenizer(TrainConfig(model="tiny"))), 60)


def numbered(rows: list[dict[str, Any]]) -> list[Case]:
    return [Case(number, row.get("prompt", []), row, number) for number, row in enumerate(rows)]


def made(rows: list[dict[str, Any]], limit: PromptLimit, **options: Any) -> DatasetSplit:
    return split((numbered(rows), []), TrainConfig(**options), limit)


def prompts(cases: list[Case]) -> set[str]:
    return {case.prompt if isinstance(case.prompt, str) else case.prompt[0]["content"] for case in cases}


@pytest.mark.parametrize(("repeats", "asked"), [(3, 6), (3, 7), (3, 1), (25, 10), (1, 8)])
def test_rows_with_the_same_prompt_stay_on_one_side(repeats: int, asked: int, limit: PromptLimit) -> None:
    """The same prompt is what the model is shown the same, whatever else the messages hold."""
    contents = [f"say {n % (100 // repeats)}" for n in range(100)]
    rows = [{"prompt": [{"role": "user", "content": text, "id": n}]} for n, text in enumerate(contents)]
    found, halved = (made(rows, limit, eval_cases=asked, save_best=best) for best in (False, True))

    assert prompts(found.train).isdisjoint(prompts(found.held_out))
    assert repeats > asked or prompts(halved.choosing).isdisjoint(prompts(halved.held_out))
    assert asked - repeats < len(found.held_out) <= asked
    assert 100 - len(found.train) - len(found.held_out) < repeats
    assert found.overlap == 0


@pytest.mark.parametrize(
    ("rows", "repeats", "prompts_held_out", "rows_held_out"),
    [
        (9, 1, 0, 0), (10, 1, 4, 4), (25, 1, 8, 8), (200, 1, 20, 20), (900, 1, 64, 64), (64, 3, 8, 24),
        (100, 50, 1, 50),
    ],
)  # fmt: skip
def test_by_default_eight_prompts_are_held_out_where_a_tenth_is_less_and_that_is_two_fifths_at_most(
    rows: int, repeats: int, prompts_held_out: int, rows_held_out: int, limit: PromptLimit
) -> None:
    found = made([{"prompt": f"say {n // repeats}", "answer": n} for n in range(rows)], limit)
    assert len(prompts(found.held_out)) == prompts_held_out
    assert len(found.held_out) in range(rows_held_out - 2, rows_held_out + 1)  # the last prompt may have fewer rows


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "may_open", "overlap"),
    [({"prompt": "guess"}, False, 4), ({}, True, 0), ({"prompt": [SYSTEM]}, True, 0)],
)
def test_rows_with_one_prompt_or_none_are_split_by_their_rows(
    prompt: dict[str, Any], may_open: bool, overlap: int, limit: PromptLimit
) -> None:
    """Where the environment speaks first there is no question that could look the same."""
    found = made(
        [{**prompt, "number": f"a call at 0x{n // 2}"} for n in range(20)],
        replace(limit, may_open=may_open),
        eval_cases=4,
    )

    numbers = [{case.row["number"] for case in cases} for cases in (found.train, found.held_out)]
    assert numbers[0].isdisjoint(numbers[1])
    assert (len(found.train), len(found.held_out), found.overlap, found.dropped) == (16, 4, overlap, 0)


def test_what_training_needs_is_not_taken_from_it_unasked(limit: PromptLimit) -> None:
    rows = [{"prompt": f"say {n % 2}"} for n in range(40)]
    found = split((numbered(rows), []), TrainConfig(), limit, needed=30)
    assert (len(found.train), len(found.held_out)) == (40, 0)


def test_what_an_eval_dataset_shares_with_training_and_what_is_too_long_is_counted(limit: PromptLimit) -> None:
    own_eval = numbered([{"prompt": "say 1"}, {"prompt": "say 1", "other": 1}, {"prompt": "tell"}])
    rows = [{"prompt": f"say {n}{'a' * 80 * (n % 4 == 0)}"} for n in range(8)]
    found = split((numbered(rows), own_eval), TrainConfig(), limit)
    assert (found.overlap, found.dropped, [case.number for case in found.train]) == (2, 2, [1, 2, 3, 5, 6, 7])
    assert [int(note.split()[0]) for note in found.notes(60)] == [2, 2]
