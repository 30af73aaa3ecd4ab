"""Tools: what the model is shown of them, how its calls are read and checked, and whose fault it is when one fails."""

from __future__ import annotations

import asyncio
import enum
import math
import sys
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Optional

import pytest
from pydantic import BaseModel, Field

from aitrain import EnvironmentFailed
from aitrain.environment.completion_parser import ToolCall, parse_call, read_calls
from aitrain.environment.tools import MAX_ERROR, Tools
from tests.conftest import case_name


class Board(enum.Enum):
    none = "none"
    half = "half"


@dataclass
class Guest:
    title: str
    age: int = 30


class Room(BaseModel):
    """A room of a hotel."""

    guests: list[Guest] = []
    board: Board = Board.none


class NotDescribable:
    pass


class Owner:
    def __init__(self, *tools: Any) -> None:
        self._tools: Any = list(tools)

    def get_tools(self) -> Any:
        return self._tools


class Hotels:
    """Two tools that keep what they were given, as an episode of an environment has them."""

    def __init__(self) -> None:
        self.booked: list[Any] = []

    def get_tools(self) -> Any:
        return [self.search_hotels, self.book_hotel]

    def search_hotels(self, city: str, stars: int = 3) -> list[dict[str, Any]]:
        """Find hotels
        in a city.

        The cheapest come first.

        Args:
            city: where to look,
                in English
            stars (int, optional): how many at least: from 1 to 5

        Returns:
            city: not this
        """
        return [{"name": "Zürich Inn", "city": city, "stars": stars}]

    async def book_hotel(self, name: str, nights: int, arrival: Optional[date] = None) -> None:  # noqa: UP045
        """Book it.

        :param name: which one
        :param int nights: how long,
            at least 1
        :returns: nothing
        """
        await asyncio.sleep(0)
        self.booked.append((name, nights, arrival))

    def secret(self) -> str:
        return "not a tool"


def tool_with(hint: Any, *default: Any, doc: str = "", kept: list[Any] | None = None) -> Owner:
    """The owner of a tool with one argument, `it`."""

    def tool(it: Any) -> None:
        if kept is not None:
            kept.append(it)

    tool.__annotations__, tool.__defaults__, tool.__doc__ = {"it": hint}, default, doc
    return Owner(tool)


def parameters_of(owner: Any) -> dict[str, Any]:
    return dict(Tools.of(owner).schemas[0]["function"]["parameters"])


def given(hint: Any, value: Any) -> Any:
    """What a tool with this hint receives, or the error that the model is given."""
    kept: list[Any] = []
    answer, is_wrong, _ = Tools.of(tool_with(hint, kept=kept)).run(ToolCall("tool", {"it": value}))
    return answer if is_wrong else kept[0]


def answer_of(owner: Any, name: str, /, **arguments: Any) -> tuple[str, bool]:
    return Tools.of(owner).run(ToolCall(name, arguments))[:2]


def refusal(owner: Any) -> str:
    with pytest.raises(EnvironmentFailed) as raised:
        Tools.of(owner)
    assert len(str(raised.value).splitlines()) <= 5
    return str(raised.value)


def tagged(*blocks: str) -> str:
    return "".join(f"<tool_call>{block}</tool_call>" for block in blocks)


# -- reading calls


def test_calls_are_read_in_order_and_taken_out_of_the_text() -> None:
    assert read_calls("  Zürich, I think. </tool_call>  ") == ("  Zürich, I think. </tool_call>  ", [])
    first, second = '{"name": "a", "arguments": {"x": [1, {"y": null}]}}', '{"arguments": {}, "name": " b "}'
    text = f"First \udc00\n{tagged(first)} then {tagged(second)}"

    assert read_calls(text) == ("First \ufffd\n then", [ToolCall("a", {"x": [1, {"y": None}]}), ToolCall("b", {})])
    blocks = (
        '{"name": "a", "parameters": {"x": 1}}',
        '{"name": "b", "arguments": " {\\"x\\": 1.5e3} "}',
        '{"name": "c"}',
    )
    _, [*calls, rest] = read_calls(tagged(*blocks, '{"name": "c"} and more'))
    assert calls == [ToolCall("a", {"x": 1}), ToolCall("b", {"x": 1500.0}), ToolCall("c", {})]
    assert "not valid JSON" in rest.problem


def test_a_tag_that_is_not_closed_is_a_wrong_call() -> None:
    said, calls = read_calls('Hm <tool_call>{"name": "a"}<tool_call>{"name": "b"}</tool_call><tool_call>')
    assert (said, [call.name for call in calls]) == ("Hm", ["", "b", ""])
    assert all("no closing </tool_call>" in call.problem for call in calls if not call.name)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("", "not valid JSON"),
        ('[{"name": "a"}]', "not a JSON object"),
        ("{}", 'no "name"'),
        ('{"name": "a", "arguments": [1]}', "a: the arguments are not a JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "not valid JSON"),
        ('{"name": "a", "arguments": "{} {}"}', "a: the arguments are not valid JSON"),
        *(
            (f'{{"name": "a", "arguments": {{"x": {value}}}}}', "not valid JSON")
            for value in ("1e999", "9" * 5000, "[" * 200 + "]" * 200, "[" * 10_000 + "]" * 10_000)
        ),
    ],
    ids=case_name,
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_what_is_wrong(block: str, problem: str) -> None:
    (call,) = read_calls(tagged(block))[1]

    assert call.arguments is None
    assert problem in call.problem
    assert len(call.problem) < 200
    assert call.name == ("a" if "arguments are" in problem else "")
    assert Tools.of(Hotels()).run(call)[:2] == (f"error: {call.problem}", True)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800"])
def test_arguments_that_a_models_own_parser_read_and_json_cannot_have_are_wrong(value: object) -> None:
    call = parse_call({"name": "a", "arguments": {"x": value}})
    assert (call.arguments, "a: the arguments are not valid JSON" in call.problem) == (None, True)


# -- what the model is shown


def test_a_tool_is_shown_with_its_docstring_and_its_hints() -> None:
    first, second = Tools.of(Hotels()).schemas

    assert first == {
        "type": "function",
        "function": {
            "name": "search_hotels",
            "description": "Find hotels in a city.\nThe cheapest come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where to look, in English"},
                    "stars": {"type": "integer", "description": "how many at least: from 1 to 5", "default": 3},
                },
                "required": ["city"],
            },
        },
    }
    assert second["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "which one"},
            "nights": {"type": "integer", "description": "how long, at least 1"},
            "arrival": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "nights"],
    }


def test_a_model_is_shown_by_its_definition_and_a_hint_describes_before_the_docstring_does() -> None:
    parameters = parameters_of(tool_with(Room))
    assert parameters["properties"]["it"] == {"$ref": "#/$defs/Room"}
    assert {*parameters["$defs"]} == {"Room", "Guest", "Board"}
    owner = tool_with(Annotated[int, Field(description="the text")], doc="Do it.\n\nArgs:\n    it: another text\n")
    assert parameters_of(owner)["properties"]["it"]["description"] == "the text"


# -- what can be a tool


def named(tool: Any, name: str = "tool") -> Any:
    tool.__name__ = name
    return tool


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (named(lambda a, /: None), "tool: it takes arguments by position only"),
        (named(lambda a, *rest: None), "tool: it takes arguments by position only"),
        (
            tool_with(NotDescribable).get_tools()[0],
            "tool: its arguments cannot be described: Unable to generate pydantic-core schema for <class",
        ),
        (lambda it: it, "neither a JSON schema nor a function or method with a name"),
        ("search_hotels", "'search_hotels': neither a JSON schema"),
    ],
    ids=case_name,
)
def test_what_cannot_be_a_tool_is_refused_by_name(tool: Any, message: str) -> None:
    assert message in refusal(Owner(tool))


def test_get_tools_is_a_method_that_returns_a_list_of_different_names() -> None:
    assert Tools.of(Owner()).schemas == Tools.of(object()).schemas == []
    assert "secret: two tools have this name" in refusal(Owner(Hotels().secret, named(lambda: 1, "secret")))
    owner, broken, ends = Owner(), Owner(), Owner()
    owner._tools = {"a": 1}
    broken.get_tools = lambda: [broken.search]  # type: ignore[attr-defined, method-assign]
    ends.get_tools = lambda: sys.exit(0)  # type: ignore[method-assign]

    assert "'a': neither a JSON schema" in refusal(owner)
    assert "get_tools raised: AttributeError" in refusal(broken)
    assert "get_tools raised: SystemExit: 0" in refusal(ends)
    assert "[broken.search]" in refusal(broken)


# -- answers


def test_arguments_are_converted_to_the_type_of_the_hint_or_a_wrong_one_is_told_with_its_place() -> None:
    assert given(int, "3") == 3
    assert given(list[Guest], [{"title": "Dr", "age": "7"}]) == [Guest("Dr", 7)]
    assert given(float, "nan").startswith("error: tool: it: ")
    assert given(list[Guest], [{"title": "Dr"}, {}]).startswith("error: tool: it.1.title: ")


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("book_hotel", {}, ["name: Missing required argument", "nights: Missing required argument"]),
        ("search_hotels", {"citi": "Bern"}, ["city: Missing required argument", "citi: Unexpected keyword argument"]),
        ("serch_hotels", {}, ["no tool serch_hotels. Tools: search_hotels, book_hotel"]),
        ("\ud800" * 1000, {}, ["error: "]),
        *((name, {}, [f"no tool {name}."]) for name in ("secret", "__class__")),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(name: str, arguments: dict[str, Any], parts: list[str]) -> None:
    hotels = Hotels()
    answer, is_wrong = answer_of(hotels, name, **arguments)

    assert is_wrong
    assert all(part in answer for part in parts)
    assert len(answer) <= MAX_ERROR
    assert answer.encode()
    assert hotels.booked == []


def test_what_a_tool_raises_is_raised_and_not_told_to_the_model() -> None:
    async def validating() -> None:
        Room.model_validate({"board": 5})

    with pytest.raises(ValueError, match="board"):
        answer_of(Owner(validating), "validating")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([Guest("Dr"), b"odd"], '[{"title": "Dr", "age": 30}, "odd"]'),
        ({date(2024, 1, 2): Board.half}, '{"2024-01-02": "half"}'),
        (math.nan, "NaN"),
        ("half \ud800 a character, \ud83d\ude00", "half \ufffd a character, 😀"),
    ],
    ids=case_name,
)
def test_what_a_tool_returns_is_told_as_text(value: Any, text: str) -> None:
    answer = answer_of(Owner(named(lambda: value)), "tool")

    assert answer == (text, False)
    answer[0].encode()


# -- schemas of the user's own


INNER: dict[str, Any] = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}, "n": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": True,
}


class WithSchema(Owner):
    most = max

    def search(self, city: str, n: int = 0) -> Any:
        return [city, n]

    def narrow(self) -> None:
        """Takes nothing."""


@pytest.mark.parametrize("schema", [INNER, {"type": "function", "function": INNER}])
def test_a_schema_is_shown_unchanged_and_its_calls_are_checked_by_the_hints_of_its_method(schema: Any) -> None:
    owner = WithSchema(schema)
    assert Tools.of(owner).schemas == [{"type": "function", "function": INNER}]
    assert answer_of(owner, "search", city="Bern", n="2") == ('["Bern", 2]', False)
    problem = "city: Missing required argument; n: Input should be a valid integer"
    answer, is_wrong = answer_of(owner, "search", n="x", anny=5)
    assert is_wrong
    assert problem in answer
    assert "anny: Unexpected keyword argument" in answer


def test_a_schema_that_names_no_method_is_shown_and_not_run_and_one_that_does_not_fit_is_refused() -> None:
    nowhere = {"name": "nowhere", "parameters": {"properties": {"city": {"type": "string"}}}}
    tools = Tools.of(WithSchema(nowhere))

    assert tools.schemas[0]["function"]["name"] == "nowhere"
    assert tools.are_only_shown
    assert "nowhere: the schema names no method" in refusal(WithSchema(INNER, nowhere))
    assert "5: it is no schema of a function" in refusal(WithSchema({"name": 5}))
    assert "unexpected keyword argument 'city'" in refusal(WithSchema({**nowhere, "name": "narrow"}))
    assert "most: no signature found" in refusal(WithSchema({**nowhere, "name": "most"}))
