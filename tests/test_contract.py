"""The contract with an environment: its methods get what they name, in both forms of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from aitrain import EnvironmentFailed
from aitrain.environment.contract import (
    SCORE_ARGUMENTS,
    Case,
    Transcript,
    arguments_for,
    call_with_tokenizer,
    check_contract,
)
from aitrain.environment.dataset import build_cases

TEXT = Transcript(Case(7, "38 + 47 =", {"prompt": "38 + 47 =", "answer": 85, "text": "a column"}), " 85")
QUESTION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "38 + 47 ="}]
ANSWER = [{"role": "assistant", "content": " 85"}]
CHAT = Transcript(Case(7, QUESTION, {"prompt": QUESTION, "answer": 85}), ANSWER)


# -- what score_episode is given


@pytest.mark.parametrize(
    ("completion", "answer", "messages"),
    [
        (TEXT, " 85", [{"role": "user", "content": "38 + 47 ="}, *ANSWER]),
        (CHAT, ANSWER, [*QUESTION, *ANSWER]),
    ],
    ids=["text", "chat"],
)
def test_a_completion_has_the_form_of_its_prompt(completion: Transcript, answer: Any, messages: list[Any]) -> None:
    words = completion.arguments()

    assert (words["completion"], words["prompt"], words["messages"]) == (answer, completion.case.prompt, messages)
    assert (words["text"], words["case_idx"], words["answer"]) == (" 85", 7, 85)
    assert words["case"] == completion.case.row, "with the column `text`, over which our word wins"


class Methods:
    def aitraining(self, model: Any, tokenizer: Any, completion: Any, case_idx: Any) -> None: ...
    def everything(self, **words: Any) -> None: ...
    def optional(self, *, text: Any, tolerance: float = 0.1) -> None: ...


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("aitraining", {"model", "tokenizer", "completion", "case_idx"}),
        ("everything", {*SCORE_ARGUMENTS, "answer"}),
        ("optional", {"text"}),
    ],
)
def test_a_method_gets_the_words_that_it_names_and_no_others(method: str, names: set[str]) -> None:
    words = {**TEXT.arguments(), "model": "a model", "tokenizer": "a tokenizer"}

    given = arguments_for(getattr(Methods(), method), words)

    assert set(given) == names
    assert given == {name: words[name] for name in names}


# -- what is refused before a model is loaded


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"episode": print, "start": print}, r"Hotel has both \w+ and \w+"),
        ({"episode": print, "score_episode": print}, r"Hotel has both \w+ and \w+"),
        ({"score_episode": 0.5}, "Hotel has no score_episode"),
        ({"score_episode": print, "__slots__": ()}, "Hotel has __slots__"),
        (
            {"build_dataset": None, "build_datasets": print, "score_episode": print},
            "Hotel has no build_dataset",
        ),
    ],
)
def test_methods_that_cannot_be_are_refused_before_a_model_is_loaded(members: dict[str, Any], word: str) -> None:
    with pytest.raises(EnvironmentFailed, match=word):
        build_cases(type("Hotel", (), {"build_dataset": print, **members})(), None)


def by_position(self: Any, completion: str, /) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("method", "function", "refused"),
    [
        ("score_episode", lambda self, case_id: 1.0, r"case_id\. Did you mean case_idx\?(.|\n)*answer, city"),
        ("score_episode", by_position, "by position only: completion"),
        ("score_episode", lambda self, answer, text, limit=3: 1.0, ""),
        ("start", lambda self, completion: None, "by position only: completion"),  # there is none yet
        ("score_group", lambda self, text: [], r"Did you mean texts\?"),
    ],
)
def test_a_parameter_that_cannot_be_given_is_refused(method: str, function: Callable[..., Any], refused: str) -> None:
    members = {"score_episode": lambda self: 0.0} if method == "score_group" else {}
    hotel = type("Hotel", (), {"build_dataset": lambda self: [], **members, method: function})()
    with pytest.raises(EnvironmentFailed, match=refused) if refused else nullcontext():
        check_contract(hotel, {"prompt", "city", "answer"})


# -- build_dataset


class Builders:
    def optional(self, tok: Any = None) -> Any:
        return tok

    def limit_and_keyword(self, limit: int = 3, *, tokenizer: Any) -> Any:
        return tokenizer

    async def slowly(self, tokenizer: Any) -> Any:
        await asyncio.sleep(0)
        return tokenizer

    def only_a_limit(self, limit: int = 3) -> Any:
        return "nothing given" if limit == 3 else limit


@pytest.mark.parametrize("name", [name for name in vars(Builders) if not name.startswith("_")])
def test_build_dataset_gets_the_tokenizer_whatever_it_calls_it_or_nothing(name: str) -> None:
    expected = "nothing given" if name == "only_a_limit" else "a tokenizer"

    assert call_with_tokenizer(getattr(Builders(), name), "a tokenizer") == expected


# -- async methods


def test_an_async_method_can_be_waited_for_where_a_loop_runs_already_as_in_a_notebook() -> None:
    async def notebook_cell() -> Any:
        return call_with_tokenizer(Builders().slowly, "a tokenizer")

    assert asyncio.run(notebook_cell()) == "a tokenizer"
