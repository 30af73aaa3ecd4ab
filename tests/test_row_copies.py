"""Rows are read-only for environments: each call gets a copy of its row, and nothing that it changes stays."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from aitrain import TrainConfig
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.row_copies import copy_arguments, copy_rows
from aitrain.environment.runner import start_runner
from aitrain.environment.session import AssistantTurn
from tests import runner_calls

QUESTION = [{"role": "user", "content": "38 + 47 ="}]
ANSWER = [{"role": "assistant", "content": " 85"}]


def row() -> dict[str, Any]:
    return {"prompt": deepcopy(QUESTION), "answer": {"number": 85, "steps": [8, 5]}, "case_idx": 3}


class Rows:
    def build_dataset(self) -> list[dict[str, Any]]:
        return [row()]


class Spoils(Rows):
    """Changes in place all that it is given, and scores 1.0 where nothing had been changed before."""

    def score_episode(
        self, completion: Any, prompt: Any, case: Any, messages: Any, answer: Any, text: str, case_idx: int
    ) -> float:
        is_fresh = (len(prompt), len(messages), len(completion), answer, case) == (1, 2, 1, row()["answer"], row())
        conversation = prompt
        conversation += completion
        completion[0]["content"] = "forged"
        messages.append("more")
        answer["steps"].append("leaked")
        case["extra"] = "leaked"
        case["prompt"][0]["content"] = "forged"
        return float(is_fresh)


class SpoilsInTurns(Rows):
    def episode(self, prompt: Any, case: Any, answer: Any) -> Generator[None, str, float]:
        is_fresh = (prompt, answer, case) == (QUESTION, row()["answer"], row())
        prompt.append("more")
        answer.clear()
        case["prompt"].clear()
        yield
        return float(is_fresh)


class SpoilsInAnObject(Rows):
    def start(self, prompt: Any, case: Any, **columns: Any) -> SpoilsInAnObject:
        self.is_fresh = (prompt, columns["answer"], case) == (QUESTION, row()["answer"], row())
        columns["answer"].clear()
        prompt.clear()
        return self

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return float(self.is_fresh)


def scores(environment: Any, isolation: str = "thread") -> tuple[list[float | None], Case, list[Transcript]]:
    """One case, played by several episodes at the same time and then once more."""
    row_of_case = row()
    case = Case(3, row_of_case["prompt"], row_of_case)
    completions = [Transcript(case, deepcopy(ANSWER)) for _ in range(6)]
    found: list[float | None] = []
    with closing(start_runner(environment, TrainConfig(rl_env_isolation=isolation, rl_env_workers=3))) as runner:
        for _ in range(2):
            plays = runner_calls.open_sessions(runner, [case] * 6, range(6))
            if runner.has_sessions:
                runner_calls.respond(runner, plays, [AssistantTurn(" 85")] * 6)
            found += [one.score for one in runner_calls.score(runner, plays, completions)]
            runner_calls.end(runner, plays)
    return found, case, completions


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("environment", [Spoils, SpoilsInTurns, SpoilsInAnObject])
def test_what_a_call_changes_in_its_row_is_seen_by_no_other_call(environment: Any, isolation: str) -> None:
    found, case, completions = scores(environment(), isolation)

    assert found == [1.0] * 12
    assert case == Case(3, QUESTION, row())
    assert all(completion.content == ANSWER for completion in completions)


class Board:
    def __init__(self) -> None:
        self.cells = [0, 0]


def test_arrays_sets_tuples_and_own_objects_are_copied_too_and_what_is_one_object_stays_one() -> None:
    cells = [1]
    given: dict[str, Any] = {"a": np.zeros(3), "b": {1}, "c": (cells, 2), "d": Board(), "e": cells}

    copied = copy_arguments(given)
    copied["a"][0] = copied["d"].cells[0] = 7
    copied["b"].add(2)
    copied["e"].append(2)

    assert copied["c"] == ([1, 2], 2)
    assert given["a"][0] == given["d"].cells[0] == 0
    assert (given["b"], given["c"]) == ({1}, ([1], 2))


def test_what_cannot_or_should_not_be_copied_is_shared_inside_of_a_row_that_is_copied() -> None:
    lock, rows = threading.Lock(), [{"id": 1}]
    shared = {"lock": lock, "check": rows.append, "kind": dict, "generator": (n for n in ())}

    copied = copy_arguments({"case": {**shared, "rows": rows}})["case"]

    assert all(copied[name] is value for name, value in shared.items())
    assert copied["rows"] == rows
    assert copied["rows"][0] is not rows[0]


def test_a_row_that_holds_itself_or_nests_very_deep_is_no_error() -> None:
    own: dict[str, Any] = {}
    own["own"] = own
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    copied = copy_arguments({"own": own, "deep": deep})

    assert copied["own"]["own"] is copied["own"]
    assert copied["deep"] is deep


def test_rows_of_the_dataset_are_not_those_that_the_environment_kept() -> None:
    board = object()
    kept = [{"prompt": [{"role": "user", "content": "?"}], "board": board}]

    taken = copy_rows(kept)
    kept[0]["prompt"].append({"role": "assistant", "content": "the answer"})  # type: ignore[attr-defined]

    assert len(taken[0]["prompt"]) == 1
    assert taken[0]["board"] is board
