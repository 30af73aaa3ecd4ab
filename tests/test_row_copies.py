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
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.session import AssistantTurn
from aitrain.environment.tool_call_parser import ToolCall
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


class SpoilsWithTools(Spoils):
    def get_tools(self) -> list[Any]:
        return [self.look]

    def look(self) -> str:
        """Look."""
        return "nothing"


def scores(environment: Any, isolation: str = "thread") -> tuple[list[float | None], Case, list[Transcript]]:
    """One case, played by several episodes at the same time and then once more."""
    case = Case(3, row_of_case := row(), row_of_case)
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
@pytest.mark.parametrize("environment", [Spoils, SpoilsInTurns, SpoilsInAnObject, SpoilsWithTools])
def test_what_a_call_changes_in_its_row_is_seen_by_no_other_call(environment: Any, isolation: str) -> None:
    found, case, completions = scores(environment(), isolation)

    assert found == [1.0] * 12
    assert case == Case(3, QUESTION, row())
    assert all(completion.content == ANSWER for completion in completions)


def test_prompt_and_row_of_one_call_are_still_the_same_object() -> None:
    case = Case(3, (one := row())["prompt"], one)

    words = copy_arguments(Transcript(case, ANSWER).arguments())

    assert words["case"]["prompt"] is words["prompt"]
    assert words["prompt"] is not case.prompt


def test_what_cannot_or_should_not_be_copied_is_shared_inside_of_a_row_that_is_copied() -> None:
    lock, rows = threading.Lock(), [{"id": 1}]
    shared = {"lock": lock, "check": rows.append, "kind": dict, "generator": (n for n in ())}

    copied = copy_arguments({"case": {**shared, "rows": rows}})["case"]

    assert all(copied[name] is value for name, value in shared.items())
    assert copied["rows"] == rows
    assert copied["rows"][0] is not rows[0]


def test_arrays_sets_tuples_and_own_objects_are_copied_too() -> None:
    class Board:
        def __init__(self) -> None:
            self.cells = [0, 0]

    given: dict[str, Any] = {"array": np.zeros(3), "seen": {1}, "pair": ([1], 2), "board": Board()}

    copied = copy_arguments(given)
    copied["array"][0] = copied["board"].cells[0] = 7
    copied["seen"].add(2)
    copied["pair"][0].append(2)

    assert given["array"][0] == given["board"].cells[0] == 0
    assert given["seen"] == {1}
    assert given["pair"] == ([1], 2)


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


def test_the_model_and_the_tokenizer_are_never_copied() -> None:
    class Asks(Rows):
        def score_episode(self, model: Any, tokenizer: Any) -> float:
            return float(model is given[0] and tokenizer is given[1])

    given = ({"a": "model"}, {"a": "tokenizer"})
    with closing(EnvRunner(Asks(), TrainConfig())) as runner:
        runner.offer(*given)
        case = Case(0, "?", {"prompt": "?"})
        (scored,) = runner_calls.score(runner, runner_calls.open_sessions(runner, [case], [0]), [Transcript(case, "!")])
    assert scored.score == 1.0


def test_a_tool_call_still_reaches_the_environment() -> None:
    with closing(EnvRunner(SpoilsWithTools(), TrainConfig())) as runner:
        case = Case(3, (one := row())["prompt"], one)
        plays = runner_calls.open_sessions(runner, [case], [0])
        (move,) = runner_calls.respond(runner, plays, [AssistantTurn("", (ToolCall("look", {}),))])
        runner_calls.end(runner, plays)
    assert move.messages[0]["content"] == "nothing"
