"""Held-out cases are not trained on: what looks the same to the model stays on one side of the split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aitrain import Result, TrainConfig
from aitrain.environment.dataset import Cases
from aitrain.rollout.chat_format import ChatFormat
from aitrain.runs.run_folder import read_lines
from aitrain.training.holdout import DatasetSplit, PromptLimit, hold_out, split
from aitrain.training.model import load_tokenizer
from tests.training.test_evaluation import result_of


def chat(text: str, **extra: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **extra}]


@pytest.fixture(scope="module")
def limit() -> PromptLimit:
    return PromptLimit(ChatFormat(load_tokenizer(TrainConfig(model="tiny"))), 60)


def made(rows: list[dict[str, Any]], limit: PromptLimit, **options: Any) -> DatasetSplit:
    return split((Cases(rows, range(len(rows))), None), TrainConfig(**options), limit)


def prompts(cases: Cases) -> set[str]:
    return {str(case.prompt) for case in cases}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("repeats", "asked"), [(3, 6), (3, 7), (3, 1), (25, 10), (25, None), (1, 8)])
def test_rows_with_the_same_prompt_stay_on_one_side(
    seed: int, repeats: int, asked: int | None, limit: PromptLimit
) -> None:
    rows = [{"prompt": f"say {n % (100 // repeats)}", "answer": n} for n in range(100)]
    found = made(rows, limit, seed=seed, eval_cases=asked)

    wanted = 10 if asked is None else asked
    assert prompts(found.train).isdisjoint(prompts(found.held_out))
    assert wanted - repeats < len(found.held_out) <= wanted
    assert len(found.train) + len(found.held_out) + found.left_out == 100
    assert found.left_out < repeats
    assert found.overlap == 0


def test_rows_without_a_repeat_are_drawn_as_ever(limit: PromptLimit) -> None:
    """Checkpoints of runs that began before prompts were compared can be resumed."""
    found = made([{"prompt": f"say {n}"} for n in range(30)], limit)
    assert [case.number for case in found.held_out] == [0, 3, 20]


def test_prompts_are_the_same_when_the_model_is_shown_the_same(limit: PromptLimit) -> None:
    rows = [{"prompt": chat(f"say {n // 2}", id=n)} for n in range(20)]
    found = made(rows, limit, eval_cases=6)

    numbers = Counter(case.number // 2 for case in found.held_out)
    assert sorted(numbers.values()) == [2, 2, 2]


def test_a_dataset_of_one_prompt_is_split_by_its_rows_and_says_so(limit: PromptLimit) -> None:
    found = made([{"prompt": "guess", "number": n // 2} for n in range(20)], limit, eval_cases=4)

    assert {case.row["number"] for case in found.train}.isdisjoint(case.row["number"] for case in found.held_out)
    assert (len(found.train), len(found.held_out), found.overlap) == (16, 4, 4)


@pytest.mark.parametrize(("repeats", "said"), [(1, 0), (2, 3), (20, 0)])
def test_held_out_cases_that_ask_the_same_are_counted_as_intervals_take_each_for_a_case_of_its_own(
    repeats: int, said: int, limit: PromptLimit
) -> None:
    rows = [{"prompt": f"say {n // repeats}", "answer": n} for n in range(20)]
    for own_eval in (None, Cases(rows, range(6))):
        found = split((Cases(rows, range(20)), own_eval), TrainConfig(eval_cases=6), limit)
        assert found.repeated == said
        note = f"{said} of 6 held-out cases repeat the prompt of another one"
        assert any(text.startswith(note) for text in found.notes(60)) == bool(said)


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("prompt", [{}, {"prompt": []}, {"prompt": [SYSTEM]}])
def test_rows_that_the_environment_completes_are_split_by_their_rows(
    prompt: dict[str, Any], limit: PromptLimit
) -> None:
    """There is no question yet that could look the same, and the limit of tokens says nothing about it."""
    found = made([{**prompt, "number": n // 2} for n in range(20)], replace(limit, may_open=True), eval_cases=4)

    held_out = {case.row["number"] for case in found.held_out}
    assert {case.row["number"] for case in found.train}.isdisjoint(held_out)
    assert (len(found.train), len(held_out), found.overlap, found.dropped) == (16, 2, 0, 0)


def test_a_system_prompt_alone_is_a_prompt_where_the_environment_says_nothing_first(limit: PromptLimit) -> None:
    rows = [{"prompt": [{"role": "system", "content": f"say {n // 2}"}], "number": n} for n in range(20)]
    found = made(rows, limit, eval_cases=6)
    assert prompts(found.train).isdisjoint(prompts(found.held_out))


def test_equal_rows_can_only_be_split_as_they_are(limit: PromptLimit) -> None:
    found = made([{"prompt": "guess"}] * 20, limit)
    assert (len(found.train), len(found.held_out), found.overlap) == (18, 2, 2)


@pytest.mark.parametrize("sizes", [[1] * 50, [2, 60, 60], [40, 41, 42], [1, 1, 99], [7, 3, 3, 20, 1, 16], [50, 50]])
@pytest.mark.parametrize("count", [1, 5, 20, 45])
def test_the_size_is_near_what_was_asked_for(sizes: list[int], count: int) -> None:
    keys = [key for key, size in enumerate(sizes) for _ in range(size)]
    for seed in range(10):
        found = hold_out(keys, count, len(keys) - 1, seed)
        held = {keys[place] for place in found.held_out}
        trained = {keys[place] for place in range(len(keys)) if place not in {*found.held_out, *found.left_out}}

        assert count / 2 <= len(found.held_out) <= count or sizes == [1, 1, 99]
        assert held.isdisjoint(trained)
        assert trained
        assert found == hold_out(keys, count, len(keys) - 1, seed)


def test_what_training_needs_is_not_taken_from_it_unasked(limit: PromptLimit) -> None:
    rows = [{"prompt": f"say {n % 2}"} for n in range(40)]
    found = split((Cases(rows, range(40)), None), TrainConfig(), limit, needed=30)
    assert (len(found.train), len(found.held_out), found.left_out) == (40, 0, 0)


class Overlaps:
    """Its eval dataset has prompts that are trained on."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {n}"} for n in range(8)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "say 1"}, {"prompt": "say 1", "other": 1}, {"prompt": "tell"}]

    def score_episode(self, completion: str) -> float:
        return len(completion) % 5 / 5


def test_an_overlap_with_the_eval_dataset_is_reported_with_its_count(
    train: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Overlaps(), max_steps=1)

    assert "2 of 3 held-out cases have the same prompt as a training case" in capsys.readouterr().err
    assert result_of(result)["eval_overlap"] == 2
    assert "2 of the held\\-out cases" in (result.model / "README.md").read_text().replace("held-out", "held\\-out")
    assert len(list(read_lines(result.folder / "rollouts" / "rank0.jsonl"))) > 0
