"""Rows are read-only for environments: each call gets a copy of its row, and nothing that it changes stays."""

from __future__ import annotations

import threading
from contextlib import closing
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np

from aitrain import TrainConfig
from aitrain.environment.contract import Case, Transcript, copied
from aitrain.environment.runner import start_runner
from tests import runner_calls
from tests.rollout.scripted import assistant, user

QUESTION = [user("38 + 47 =")]
ANSWER = [assistant(" 85")]


def row() -> dict[str, Any]:
    return {"prompt": deepcopy(QUESTION), "answer": {"number": 85, "steps": [8, 5]}, "case_idx": 3}


class Spoils:
    """Changes in place all that it is given, and scores 1.0 where nothing had been changed before."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [row()]

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


def test_what_a_call_changes_in_its_row_is_seen_by_no_other_call() -> None:
    """One case, played by several episodes at the same time and then once more."""
    given = row()
    case = Case(3, given["prompt"], given)
    completions = [Transcript(case, deepcopy(ANSWER)) for _ in range(6)]
    with closing(start_runner(Spoils(), TrainConfig(rl_env_workers=3))) as runner:
        for _ in range(2):
            plays = runner_calls.open_sessions(runner, [case] * 6, range(6))
            assert [one.score for one in runner_calls.score(runner, plays, completions)] == [1.0] * 6
            runner_calls.end(runner, plays)

    assert case == Case(3, QUESTION, row())
    assert all(completion.content == ANSWER for completion in completions)


def test_arrays_tuples_and_own_objects_are_copied_and_what_cannot_be_is_shared() -> None:
    cells, lock = [1], threading.Lock()
    own, array = SimpleNamespace(cell=0), np.zeros(3)
    given: dict[str, Any] = {"a": array, "c": (cells, 2), "d": own, "f": [lock, {}]}

    taken = copied(given)
    taken["a"][0] = taken["d"].cell = 7
    taken["c"][0].append(2)

    assert array[0] == own.cell == 0
    assert given["c"] == ([1], 2)
    assert taken["f"][0] is lock
    assert taken["f"][1] is not given["f"][1]


def test_rows_of_the_dataset_are_not_those_that_the_environment_kept() -> None:
    board = object()
    kept = [{"prompt": [user("?")], "board": board}]

    taken = copied(kept, shares_objects=True)
    kept[0]["prompt"].append(assistant("the answer"))  # type: ignore[attr-defined]

    assert len(taken[0]["prompt"]) == 1
    assert taken[0]["board"] is board
