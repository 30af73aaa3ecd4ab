"""The environment's side of episodes that it begins, gets the tool calls of, or ends by a tool's result."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from aitrain import ToolResult
from aitrain.environment.contract import Case, with_opening
from aitrain.environment.dataset import build_cases
from aitrain.environment.session import EnvResponse
from aitrain.environment.tool_call_parser import ToolCall
from aitrain.errors import EnvironmentFailed
from tests.rehearsal import Rehearsed, rehearse
from tests.test_dialogue import call, failure_of

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Speaks:
    """Says what it is given when the episode begins."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"case_idx": 0}]

    def start(self) -> Any:
        return Spoken(self.said)


class Spoken:
    def __init__(self, said: Any) -> None:
        self.said = said

    async def opening(self) -> Any:
        return self.said

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return 1.0


def begun(said: Any, prompt: Any) -> Any:
    """What the model is asked."""
    return rehearse(Speaks(said), ["x"], Case(0, prompt, {})).opening.prompt


@pytest.mark.parametrize(
    ("prompt", "said", "asked"),
    [
        ([], "Guess.", [user("Guess.")]),
        ([SYSTEM], "Guess.", [SYSTEM, user("Guess.")]),
        ([SYSTEM, USER], "Guess.", [SYSTEM, user("Hello.\n\nGuess.")]),
        ([USER], [user("Guess."), user("Now.")], [user("Hello.\n\nGuess."), user("Now.")]),
        ([], [SYSTEM, user("Guess.")], [SYSTEM, user("Guess.")]),
        ([USER], [SYSTEM, user("Guess.")], [USER, SYSTEM, user("Guess.")]),
        ([USER], user("Guess."), [user("Hello.\n\nGuess.")]),
        ([USER], None, [USER]),
        ("Hello. ", "Guess.", "Hello. Guess."),
    ],
)
def test_what_the_environment_says_first_joins_the_prompt_of_the_row(prompt: Any, said: Any, asked: Any) -> None:
    assert begun(said, prompt) == asked


def test_a_message_of_parts_is_followed_and_not_joined() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello."}]}
    assert with_opening([parts], [user("Guess.")]) == [parts, user("Guess.")]


def test_the_prompt_of_the_row_is_not_changed_by_joining() -> None:
    prompt = [dict(USER)]
    with_opening(prompt, [user("Guess.")])
    assert prompt == [USER]


def test_a_generator_opens_with_its_first_yield() -> None:
    class First(Speaks):
        start = None  # type: ignore[assignment]

        def episode(self) -> Generator[str, str, float]:
            yield "Guess."
            return 1.0

    assert rehearse(First(None), ["x"], Case(0, [], {})).opening.prompt == [user("Guess.")]


def test_an_episode_without_any_message_fails_and_says_where() -> None:
    with pytest.raises(Exception, match="said nothing, and the row has no prompt") as caught:
        rehearse(Speaks(None), ["x"], Case(0, [], {}))
    assert caught.value.failure.place == "opening"  # type: ignore[attr-defined]


def test_an_opening_that_is_no_text_fails_and_says_where() -> None:
    with pytest.raises(Exception, match="which is neither text nor messages") as caught:
        rehearse(Speaks(5), ["x"], Case(0, [], {}))
    assert caught.value.failure.place == "opening"  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
def test_rows_need_no_prompt_where_the_environment_may_speak_first(row: dict[str, Any]) -> None:
    class Rows(Speaks):
        def build_dataset(self) -> list[dict[str, Any]]:
            return [{**row, "word": "fig"}]

    cases, _ = build_cases(Rows("x"), None)
    assert (cases[0].prompt, cases.is_chat) == ([], True)


@pytest.mark.parametrize("row", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
def test_rows_need_a_prompt_where_the_environment_cannot_speak_first(row: dict[str, Any]) -> None:
    class Scores:
        def build_dataset(self) -> list[dict[str, Any]]:
            return [row]

        def score_episode(self) -> float:
            return 1.0

    with pytest.raises(EnvironmentFailed, match=r"row 0 of build_dataset has (no|an invalid) prompt"):
        build_cases(Scores(), None)


def test_rows_without_a_prompt_do_not_mix_with_strings() -> None:
    class Mixed(Speaks):
        def build_dataset(self) -> list[dict[str, Any]]:
            return [{"prompt": "Say it"}, {"prompt": None}]

    with pytest.raises(EnvironmentFailed, match="row 0 has a string, row 1 none"):
        build_cases(Mixed("x"), None)


# -- steps that see the calls


class Gym:
    """Schemas that name no methods; `step` gets the calls and answers with what it is given."""

    def __init__(self, answer: Any = "done it", tools: Any = None) -> None:
        self.answer, self.seen = answer, list[tuple[str, list[ToolCall]]]()
        self.tools = tools or [{"name": "move", "parameters": {"type": "object", "properties": {}}}]

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [USER]}]

    def start(self) -> Any:
        return self

    def get_tools(self) -> Any:
        return self.tools

    async def step(self, reply: str, calls: list[ToolCall]) -> Any:
        self.seen.append((reply, calls))
        return self.answer if calls else None

    def score(self) -> float:
        return 1.0


def play(gym: Gym, *replies: str) -> Rehearsed:
    return rehearse(gym, replies, Case(0, [USER], {}))


def test_a_step_that_names_calls_gets_every_answer_with_its_calls_and_the_text_beside_them() -> None:
    gym = Gym()
    played = play(gym, "I go. " + call("move", to="b2"), "bye")

    assert played.opening.runs_tools
    assert [schema["function"]["name"] for schema in played.opening.tools] == ["move"]
    assert gym.seen == [("I go.", [ToolCall("move", {"to": "b2"})]), ("bye", [])]
    assert played.moves[0] == EnvResponse(({"role": "tool", "name": "move", "content": "done it"},), calls=1)
    assert played.is_over


def test_messages_after_calls_pass_as_they_are() -> None:
    messages = [{"role": "tool", "name": "move", "content": "ok"}, user("and now?")]
    assert play(Gym(messages), call("move")).moves[0].messages == tuple(messages)


def test_a_call_that_cannot_be_read_comes_with_its_problem_and_is_counted() -> None:
    gym = Gym()
    played = play(gym, '<tool_call>{"name": "move", </tool_call>')
    assert "not valid JSON" in gym.seen[0][1][0].problem
    assert (played.moves[0].calls, played.moves[0].wrong_calls) == (1, 1)


def test_callables_give_their_schemas_to_a_step_that_gets_the_calls_and_are_not_called() -> None:
    def move(to: str) -> str:
        """Move there."""
        raise AssertionError("it is not to be called")

    gym = Gym(tools=[move, {"name": "stay"}])
    played = play(gym, call("move", to="b2"))
    assert [schema["function"]["name"] for schema in played.opening.tools] == ["move", "stay"]
    assert gym.seen == [("", [ToolCall("move", {"to": "b2"})])]


def test_a_step_that_gets_the_calls_needs_no_tools() -> None:
    gym = Gym(tools=[])
    gym.tools = []
    assert not play(gym, "hello").opening.runs_tools
    assert gym.seen == [("hello", [])]


# -- results that end the episode


class Game:
    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [USER]}]

    def get_tools(self) -> Any:
        return [self.look, self.leave]

    def look(self) -> ToolResult:
        return ToolResult({"doors": 2})

    async def leave(self) -> ToolResult:
        """Leave the house."""
        return ToolResult("you are out", done=True)

    def score_episode(self, messages: list[Any], text: str) -> float:
        return float(messages[-1]["content"] == "you are out") if text == "" else 0.25


def test_a_tool_result_may_end_the_episode_and_is_part_of_the_conversation() -> None:
    played = rehearse(Game(), [call("look"), call("leave") + call("look"), "never"], Case(0, [USER], {}))

    looked, left = played.moves
    assert [message["content"] for message in looked.messages] == ['{"doors": 2}']
    assert not looked.is_over
    assert [message["content"] for message in left.messages] == ["you are out"]
    assert (left.is_over, left.calls) == (True, 1)
    assert played.scored.score == 1.0


@pytest.mark.parametrize("done", [True, False])
def test_a_step_may_end_the_episode_with_a_last_message(done: bool) -> None:
    """After calls its text is a tool's message, and messages pass as they are."""
    text, said = (play(Gym(ToolResult(content, done)), call("move")) for content in ("out", [user("out")]))

    assert text.moves[0] == EnvResponse(({"role": "tool", "name": "move", "content": "out"},), done, calls=1)
    assert said.moves[0] == EnvResponse((user("out"),), done, calls=1)


def test_a_generator_that_a_tool_ends_may_say_what_it_is_worth() -> None:
    class Told(Game):
        score_episode = None  # type: ignore[assignment]

        def episode(self) -> Generator[None, str, float]:
            try:
                yield
            except GeneratorExit:
                return 0.5
            return 0.0

    assert rehearse(Told(), [call("leave")], Case(0, [USER], {})).scored.score == 0.5


def test_an_attribute_called_opening_is_the_objects_own() -> None:
    class Has(Spoken):
        opening = "08:00"  # type: ignore[assignment]

    class Env(Speaks):
        def start(self) -> Any:
            return Has(None)

    assert rehearse(Env(None), ["x"], Case(0, [USER], {})).opening.prompt == [USER]


def test_failures_in_opening_have_its_name() -> None:
    class Fails(Spoken):
        async def opening(self) -> Any:
            raise ValueError("no door")

    class Env(Speaks):
        def start(self) -> Any:
            return Fails(None)

    failure = failure_of(Env(None), "x")
    assert (failure.kind, failure.place) == ("raised", "opening")
