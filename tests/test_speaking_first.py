"""The environment's side of episodes that it begins, gets the tool calls of, or ends by a tool's result."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from aitrain import ToolResult
from aitrain.environment.completion_parser import ToolCall
from aitrain.environment.contract import Case
from aitrain.environment.dataset import build_cases
from aitrain.environment.session import EnvResponse
from aitrain.errors import EnvironmentFailed
from aitrain.execution.failure import CallFailed
from tests.rehearsal import Rehearsed, call, rehearse
from tests.rollout.scripted import user

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}


class Speaks:
    """Says what it is given when the episode begins; a callable is called."""

    def __init__(self, said: Any, *rows: dict[str, Any]) -> None:
        self.said, self.rows = said, list(rows)

    def build_dataset(self) -> list[dict[str, Any]]:
        return self.rows

    def start(self) -> Any:
        return self

    async def opening(self) -> Any:
        return self.said() if callable(self.said) else self.said

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("prompt", "said", "asked"),
    [
        ([], "Guess.", [user("Guess.")]),
        ([USER], [user("Guess."), user("Now.")], [user("Hello.\n\nGuess."), user("Now.")]),
        ([USER], user("Guess."), [user("Hello.\n\nGuess.")]),
        ("Hello. ", "Guess.", "Hello. Guess."),
    ],
)
def test_what_the_environment_says_first_joins_the_prompt_of_the_row(prompt: Any, said: Any, asked: Any) -> None:
    before = deepcopy(prompt)
    assert rehearse(Speaks(said), ["x"], Case(0, prompt, {})).opening.prompt == asked
    assert prompt == before


def test_an_opening_that_says_nothing_is_a_failure() -> None:
    with pytest.raises(CallFailed, match="said nothing, and the row has no prompt"):
        rehearse(Speaks(None), ["x"], Case(0, [], {}))


@pytest.mark.parametrize("row", [{}, {"prompt": None}])
def test_rows_need_no_prompt_where_the_environment_may_speak_first(row: dict[str, Any]) -> None:
    cases, _ = build_cases(Speaks("x", row), None)
    assert (cases[0].prompt, cases[0].is_chat) == ([], True)
    with pytest.raises(EnvironmentFailed, match="row 0 and row 1, one has a string"):
        build_cases(Speaks("x", {"prompt": "Say it"}, row), None)


# -- steps that see the calls


class Gym:
    """Schemas and functions, and a `step` that gets the calls and answers with what it is given."""

    def __init__(self, answer: Any = "done it") -> None:
        self.answer, self.seen = answer, list[tuple[str, list[ToolCall]]]()

    def start(self) -> Any:
        return self

    def get_tools(self) -> Any:
        return [{"name": "move", "parameters": {"type": "object", "properties": {}}}, self.stay]

    def stay(self) -> str:
        raise AssertionError("it is not to be called")

    async def step(self, reply: str, calls: list[ToolCall]) -> Any:
        self.seen.append((reply, calls))
        return self.answer if calls else None

    def score(self) -> float:
        return 1.0


def play(gym: Gym, *replies: str) -> Rehearsed:
    return rehearse(gym, replies, Case(0, [USER], {}))


def test_a_step_that_names_calls_gets_every_answer_with_its_calls_and_the_text_beside_them() -> None:
    gym = Gym()
    played = play(gym, "I go. " + call("move", to="b2") + call("stay"), '<tool_call>{"name": "move", </tool_call>', "")

    assert played.opening.runs_tools
    assert [schema["function"]["name"] for schema in played.opening.tools] == ["move", "stay"]
    assert gym.seen[::2] == [("I go.", [ToolCall("move", {"to": "b2"}), ToolCall("stay", {})]), ("", [])]
    assert "not valid JSON" in gym.seen[1][1][0].problem
    assert played.moves[0] == EnvResponse(({"role": "tool", "name": "move", "content": "done it"},))
    assert played.is_over


def test_a_step_may_end_the_episode_with_a_last_message() -> None:
    """After calls its text is a tool's message, and messages pass as they are."""
    text, said = (play(Gym(ToolResult(content, done=True)), call("move")) for content in ("out", [user("out")]))

    assert text.moves[0] == EnvResponse(({"role": "tool", "name": "move", "content": "out"},), is_over=True)
    assert said.moves[0] == EnvResponse((user("out"),), is_over=True)
