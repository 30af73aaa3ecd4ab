"""Tools: what the model is shown of them, how its calls are read and checked, and whose fault it is when one fails."""

from __future__ import annotations

import asyncio
import enum
import functools
import json
import math
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from aitrain import EnvironmentFailed
from aitrain.environment.function_tool import describe_function
from aitrain.environment.tool_call_parser import MAX_CALLS, MAX_DEPTH, ToolCall, read_calls
from aitrain.environment.tools import MAX_ERROR, Tools
from tests.conftest import case_name

if TYPE_CHECKING:
    from somewhere import NotImported  # type: ignore[import-not-found]


class Board(enum.Enum):
    none = "none"
    half = "half"


@dataclass
class Guest:
    title: str
    age: int = 30


@dataclass
class Price:
    amount: float


class Room(BaseModel):
    """A room of a hotel."""

    guests: list[Guest] = []
    board: Board = Board.none


class Node(BaseModel):
    name: str
    children: list[Node] = []


class NotDescribable:
    pass


class Owner:
    def __init__(self, *tools: Any) -> None:
        self._tools = list(tools)

    def get_tools(self) -> Any:
        return self._tools


class Hotels:
    """Two tools that keep what they were given, as an episode of an environment has them."""

    def __init__(self) -> None:
        self.booked: list[Any] = []

    def get_tools(self) -> list[Any]:
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


def shown(hint: Any, **default: Any) -> dict[str, Any]:
    """The schema of one argument with this hint."""

    def tool(it: Any) -> None: ...

    tool.__annotations__ = {"it": hint}
    tool.__defaults__ = tuple(default.values())
    parameters = Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]
    return dict(parameters["properties"]["it"])


def given(hint: Any, value: Any) -> Any:
    """What a tool with this hint receives, or the error that the model is given."""
    kept = []

    def tool(it: Any) -> None:
        kept.append(it)

    tool.__annotations__ = {"it": hint}
    answer, is_wrong, _ = Tools.of(Owner(tool)).run(ToolCall("tool", {"it": value}))
    return answer if is_wrong else kept[0]


def returned(value: Any) -> str:
    def tool() -> Any:
        return value

    answer, is_wrong, _ = Tools.of(Owner(tool)).run(ToolCall("tool", {}))
    assert not is_wrong
    return answer


def answer_of(owner: Any, name: str, /, **arguments: Any) -> tuple[str, bool]:
    return Tools.of(owner).run(ToolCall(name, arguments))[:2]


def refusal(owner: Any) -> str:
    with pytest.raises(EnvironmentFailed) as raised:
        Tools.of(owner)
    message = str(raised.value)
    assert "arbitrary_types_allowed" not in message
    assert message.startswith(f"{type(owner).__name__}.get_tools")
    assert len(message.splitlines()) <= 5
    assert "errors.pydantic.dev" not in message
    return message


def tagged(*blocks: str) -> str:
    return "".join(f"<tool_call>{block}</tool_call>" for block in blocks)


def problem_of(block: str) -> str:
    (call,) = read_calls(tagged(block))[1]
    assert call.arguments is None
    assert call.problem
    return call.problem


# -- reading calls


def test_an_answer_without_calls_is_its_text() -> None:
    assert read_calls("  Zürich, I think. </tool_call>  ") == ("Zürich, I think. </tool_call>", [])


def test_calls_are_read_in_order_and_taken_out_of_the_text() -> None:
    text = 'First\n<tool_call>\n{"name": "a", "arguments": {"x": [1, {"y": null}]}}\n</tool_call> then ' + tagged(
        '{"arguments": {}, "name": " b "}'
    )

    assert read_calls(text) == ("First\n then", [ToolCall("a", {"x": [1, {"y": None}]}), ToolCall("b", {})])


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('{"name": "a"}', {}),
        ('{"name": "a", "arguments": null}', {}),
        ('{"name": "a", "parameters": {"x": 1}}', {"x": 1}),
        ('{"name": "a", "arguments": {"x": 1}, "parameters": {"x": 2}}', {"x": 1}),
        ('{"name": "a", "arguments": " {\\"x\\": 1} "}', {"x": 1}),
        ('{"name": "a", "arguments": {"x": "{}"}, "id": 7}', {"x": "{}"}),
        ('{"name": "a", "arguments": {"x": 1.5e3}}', {"x": 1500.0}),
        (f'{{"name": "a", "arguments": {{"x": {10**299}}}}}', {"x": 10**299}),
    ],
)
def test_arguments_come_in_several_forms(block: str, arguments: dict[str, Any]) -> None:
    assert read_calls(tagged(block))[1] == [ToolCall("a", arguments)]


@pytest.mark.parametrize("between", ["\n", "", " \n\n "])
def test_several_objects_between_one_pair_of_tags_are_several_calls(between: str) -> None:
    block = between.join(['{"name": "a"}', '{\n"name": "b",\n"arguments": {"x": 1}\n}', '{"name": "c"}'])

    assert read_calls(tagged(block))[1] == [ToolCall("a", {}), ToolCall("b", {"x": 1}), ToolCall("c", {})]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("", "the call is not valid JSON: Expecting value: line 1 column 1"),
        ("{'name': 'a'}", "the call is not valid JSON: Expecting property name enclosed in double quotes: line 1"),
        ('{"name": "a"', "the call is not valid JSON: Expecting ',' delimiter"),
        ('[{"name": "a"}]', 'the call is not a JSON object with "name" and "arguments"'),
        ('"a"', "the call is not a JSON object"),
        ("5", "the call is not a JSON object"),
        ("null", "the call is not a JSON object"),
        ("{}", 'the call has no "name", or one that is not a string'),
        ('{"name": ""}', 'the call has no "name"'),
        ('{"name": 5}', 'the call has no "name"'),
        ('{"name": ["a"]}', 'the call has no "name"'),
        ('{"name": {"a": 1}}', 'the call has no "name"'),
        ('{"name": "a", "arguments": [1]}', "a: the arguments are not a JSON object"),
        ('{"name": "a", "arguments": 5}', "a: the arguments are not a JSON object"),
        ('{"name": "a", "arguments": "x = 1"}', "a: the arguments are not valid JSON: Expecting value"),
        ('{"name": "a", "arguments": "[]"}', "a: the arguments are not a JSON object"),
        ('{"name": "a", "arguments": "{} {}"}', "a: the arguments are not a JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a value of JSON"),
        ('{"name": "a", "arguments": {"x": -Infinity}}', "-Infinity is not a value of JSON"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "1e999... is too large a number"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "99999999999999999999... is too large"),
        ('{"name": "a", "arguments": "{\\"x\\": 1e999}"}', "too large"),
        ('{"name": "a", "arguments": {"x": 1, "x": 2}}', "x is given twice"),
        ('{"name": "a", "name": "b"}', "name is given twice"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 10_000 + "]" * 10_000 + "}}", "nests deeper than 100 levels"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 200 + "]" * 200 + "}}", "nests deeper than 100 levels"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "nests deeper than 100 levels"),
    ],
    ids=lambda value: value[:50],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_what_is_wrong(block: str, problem: str) -> None:
    assert problem in problem_of(block)
    assert len(problem_of(block)) < 200


def test_arguments_may_nest_as_deep_as_is_said() -> None:
    def block(depth: int) -> str:  # the call and its arguments are two levels
        return '{"name": "a", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"

    assert read_calls(tagged(block(MAX_DEPTH - 2)))[1][0].problem == ""
    assert "nests deeper" in problem_of(block(MAX_DEPTH))


def test_a_call_with_unreadable_arguments_keeps_its_name() -> None:
    assert read_calls(tagged('{"name": "a", "arguments": 5}'))[1][0].name == "a"


def test_what_follows_a_readable_call_is_a_call_of_its_own() -> None:
    first, second = read_calls(tagged('{"name": "a"} and more'))[1]

    assert first == ToolCall("a", {})
    assert "the call is not valid JSON" in second.problem


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('Hm <tool_call>{"name": "a"}', ["?"]),
        ('Hm <tool_call>{"name": "a"}<tool_call>{"name": "b"}</tool_call>', ["?", "b"]),
        ('Hm <tool_call>{"name": "a"}</tool_call><tool_call>', ["a", "?"]),
    ],
)
def test_an_opening_tag_without_a_closing_one_is_a_wrong_call(text: str, names: list[str]) -> None:
    said, calls = read_calls(text)

    assert said == "Hm"
    assert [call.name or "?" for call in calls] == names
    assert all(call.problem == "the call has no closing </tool_call>" for call in calls if not call.name)


@pytest.mark.parametrize("escaped", ["\\ud800", "\ud800"])
@pytest.mark.parametrize("block", ['{"name": "a@", "arguments": {"x@": ["y@"]}}', '{"name": "a@", "arguments": 5}'])
def test_half_a_character_is_replaced(block: str, escaped: str) -> None:
    said, (call,) = read_calls(f"Hi \udc00 {tagged(block.replace('@', escaped))}")

    assert said == "Hi \ufffd"
    repr(call).encode()
    assert "\\ud800" not in repr(call)
    assert "a\ufffd" in repr(call)


def test_half_a_character_inside_arguments_in_a_string_is_replaced() -> None:
    (call,) = read_calls(tagged(json.dumps({"name": "a", "arguments": '{"x": "\\ud800 \\ud83d\\ude00 \\u00fc"}'})))[1]

    assert call.arguments == {"x": "\ufffd 😀 ü"}


@pytest.mark.parametrize("separator", ["", "\n"])
def test_calls_beyond_the_limit_are_one_problem(separator: str) -> None:
    for text in (tagged(separator.join(['{"name": "a"}'] * 1000)), tagged(*['{"name": "a"}'] * 1000)):
        said, calls = read_calls(text)

        assert said == ""
        assert [call.name for call in calls] == ["a"] * MAX_CALLS + [""]
        assert "more than 64 calls" in calls[-1].problem
    assert len(read_calls(tagged(*['{"name": "a"}'] * MAX_CALLS))[1]) == MAX_CALLS


MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * (MEGABYTE // 11),
        "</tool_call>" * (MEGABYTE // 12),
        "<tool_call></tool_call>" * (MEGABYTE // 23),
        "<tool_call>" + "<" * MEGABYTE,
        "<tool_call>" * 1000 + "x" * MEGABYTE,
        "<" * MEGABYTE,
        tagged("{" * MEGABYTE),
        tagged('{"a":' * (MEGABYTE // 5)),
        tagged('"' + "\\" * MEGABYTE),
        tagged(" " * MEGABYTE),
        tagged('{"name": "a"}' + " " * MEGABYTE),
        tagged("1 " * (MEGABYTE // 2)),
        tagged('{"name": "' + "a" * MEGABYTE + '"}'),
        tagged('{"name": "a", "arguments": {"x": ' + "9" * MEGABYTE + "}}"),
        tagged('{"name": "a", "arguments": {"x": [' + "[]," * (MEGABYTE // 3) + "1]}}"),
        tagged(json.dumps({"name": "search_hotels", "arguments": {f"city{n}": n for n in range(60_000)}})),
        tagged('{"name": "search_hotels", "arguments": {"' + "city" * (MEGABYTE // 4) + '": 1}}'),
        tagged('{"name": "book_hotel", "arguments": {"name": 1, "nights": "' + "9" * MEGABYTE + '"}}'),
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.slow
def test_a_megabyte_is_read_and_answered_in_a_moment(text: str) -> None:
    tools, start = Tools.of(Hotels()), time.process_time()

    _, calls = read_calls(text)
    answers = [tools.run(call) for call in calls]

    assert time.process_time() - start < 2
    assert all(is_wrong and len(answer) <= MAX_ERROR for answer, is_wrong, _ in answers)


def test_a_call_is_written_into_the_conversation_as_chat_templates_expect() -> None:
    assert ToolCall("a", {"x": 1}).as_message_part() == {
        "type": "function",
        "function": {"name": "a", "arguments": {"x": 1}},
    }
    assert ToolCall("", None, "no").as_message_part() == {"type": "function", "function": {"name": "", "arguments": {}}}


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
                    "stars": {
                        "type": "integer",
                        "description": "how many at least: from 1 to 5",
                        "default": 3,
                    },
                },
                "required": ["city"],
            },
        },
    }
    assert second["function"]["description"] == "Book it."
    assert second["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "which one"},
            "nights": {"type": "integer", "description": "how long, at least 1"},
            "arrival": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "nights"],
    }


GUEST = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "age": {"type": "integer", "default": 30}},
    "required": ["title"],
}
BOARD = {"type": "string", "enum": ["none", "half"]}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (dict, {"type": "object", "additionalProperties": True}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (date, {"type": "string", "format": "date"}),
        (Board, BOARD),
        (Guest, GUEST),
        (list[Guest], {"type": "array", "items": GUEST}),
        (Annotated[int, Field(ge=1)], {"type": "integer", "minimum": 1}),
        (
            Room,
            {
                "type": "object",
                "description": "A room of a hotel.",
                "properties": {
                    "guests": {"type": "array", "items": GUEST, "default": []},
                    "board": {**BOARD, "default": "none"},
                },
            },
        ),
    ],
    ids=case_name,
)
def test_a_hint_is_shown_as_a_flat_schema(hint: Any, schema: dict[str, Any]) -> None:
    assert shown(hint) == schema


def test_a_type_that_holds_itself_is_shown_once_beside_the_properties() -> None:
    def tool(it: Node, other: list[Node]) -> None: ...

    parameters = Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]

    reference = {"$ref": "#/$defs/Node"}
    assert parameters["properties"] == {"it": reference, "other": {"type": "array", "items": reference}}
    assert parameters["$defs"]["Node"]["properties"] == {
        "name": {"type": "string"},
        "children": {"type": "array", "items": reference, "default": []},
    }


def test_alternatives_leave_nothing_that_points_nowhere() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]

    class Dog(BaseModel):
        kind: Literal["dog"]

    schema = json.dumps(shown(Annotated[Cat | Dog, Field(discriminator="kind")]))

    assert "$" not in schema
    assert '"cat"' in schema


@pytest.mark.parametrize(
    ("default", "shown_as"),
    [(3, 3), (None, None), (Board.half, "half"), (date(2024, 1, 2), "2024-01-02"),
     (Guest("Dr", 1), {"title": "Dr", "age": 1})],
    ids=case_name,
)  # fmt: skip
def test_a_default_is_shown_where_json_can_hold_it(default: Any, shown_as: Any) -> None:
    assert shown(Any, default=default) == {"default": shown_as}


@pytest.mark.parametrize("default", [object(), math.inf, math.nan, b"\xff", [lambda: 1]], ids=case_name)
def test_a_default_that_json_cannot_hold_is_not_shown(default: Any) -> None:
    assert shown(Any, default=default) == {}
    assert shown(Annotated[Any, Field(default)]) == {}


def test_an_argument_without_a_hint_takes_anything() -> None:
    def tool(it, other=1): ...  # type: ignore[no-untyped-def]

    parameters = Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"it": {}, "other": {"default": 1}}, "required": ["it"]}


def test_a_tool_without_arguments_or_docstring_is_shown_all_the_same() -> None:
    def tool() -> None: ...

    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": "tool", "description": "", "parameters": parameters}
    assert Tools.of(Owner(tool)).schemas == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    "hint",
    [
        Annotated[int, "the text"],
        Annotated[int, Field(description="the text")],
        Annotated[int, Field(description="hidden"), "the text"],
        Annotated[int, "the text"] | None,
        Annotated[int | None, "the text"],
        Annotated[Guest, "the text"],
    ],
    ids=case_name,
)
def test_a_hint_may_describe_its_argument_and_wins_over_the_docstring(hint: Any) -> None:
    def tool(it: Any) -> None:
        """Do it.

        Args:
            it: another text
        """

    tool.__annotations__["it"] = hint
    properties = Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]["properties"]

    assert properties["it"]["description"] == "the text"
    assert shown(list[Annotated[int, "of an item"]]).get("description") is None


def test_a_parameter_may_be_called_like_anything_of_pydantics() -> None:
    def tool(copy: int, json: str, model_config: float, _it: int = 1) -> str:
        return f"{copy} {json} {model_config} {_it}"

    arguments = {"copy": "1", "json": "a", "model_config": 2, "_it": 3}
    assert answer_of(Owner(tool), "tool", **arguments) == ("1 a 2.0 3", False)
    assert list(Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]["properties"]) == list(arguments)
    assert answer_of(Owner(tool), "tool", **{**arguments, "copy": "x"})[0].startswith("error: tool: copy: Input should")


def test_the_text_of_a_pydantic_field_that_is_the_default_wins_over_the_docstring() -> None:
    def tool(it: int = Field(5, description="the text")) -> None:
        """Do it.

        Args:
            it: another text
        """

    function = Tools.of(Owner(tool)).schemas[0]["function"]
    assert function["parameters"]["properties"]["it"] == {"type": "integer", "description": "the text", "default": 5}


def test_a_pydantic_field_as_the_default_is_a_default() -> None:
    kept = []

    def tool(it: int = Field(description="the text"), other: int = Field(3, le=5)) -> None:
        kept.append((it, other))

    parameters = Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]

    assert parameters["properties"]["it"] == {"type": "integer", "description": "the text"}
    assert parameters["required"] == ["it"]
    assert answer_of(Owner(tool), "tool", it=1) == ("null", False)
    assert kept == [(1, 3)]
    assert "other: Input should be less than or equal to 5" in answer_of(Owner(tool), "tool", it=1, other=6)[0]
    assert answer_of(Owner(tool), "tool") == ("error: tool: missing argument: it", True)


@pytest.mark.parametrize(
    ("docstring", "description", "told"),
    [
        ("Find it.", "Find it.", None),
        ("Find it.\n\n    Args:\n        it: the text\n", "Find it.", "the text"),
        ("Find it.\n\n    Args:\n        it (list[tuple(int, int)], optional): the text\n", "Find it.", "the text"),
        ("Find it.\n\n    Args:\n        it:\n            the\n\n            text\n", "Find it.", "the text"),
        ("Find it.\n\n    Args:\n        it: the\n          other: text\n", "Find it.", "the other: text"),
        ("Find it.\n\n    Args:\n      it: the text\n      ctx: no\n    Note: x", "Find it.", "the text"),
        ("Find it.\n    :param it: the text\n    :return: it", "Find it.", "the text"),
        ("Find it.\n    :param list[int] it: the\n        text\n    :type it: int", "Find it.", "the text"),
        ("Find it.\n\n    Returns:\n        it: not this\n", "Find it.", None),
        ("Find it.\n\n    Returns: it\n\n    Args:\n      it: the text", "Find it.", "the text"),
        ("Find it.\n\n    Raises:\n        it: not this\n", "Find it.", None),
        ("Note: find\n    it.\n\n    Example: 1", "Note: find it.\nExample: 1", None),
        ("\n    Args:\n        it: the text", "", "the text"),
    ],
)  # fmt: skip
def test_docstrings_are_read_in_the_usual_forms(docstring: str, description: str, told: str | None) -> None:
    def tool(it: int, other: int = 0) -> None: ...

    tool.__doc__ = docstring
    function = Tools.of(Owner(tool)).schemas[0]["function"]

    assert function["description"] == description
    assert function["parameters"]["properties"]["it"].get("description") == told


def test_what_is_returned_may_be_hinted_with_what_is_not_imported() -> None:
    def tool(it: int) -> NotImported: ...

    assert Tools.of(Owner(tool)).schemas[0]["function"]["parameters"]["required"] == ["it"]


# -- what can be a tool


def test_no_get_tools_is_no_tools() -> None:
    for owner in (object(), None, {"get_tools": 1}, Owner()):
        tools = Tools.of(owner)
        assert not tools
        assert (len(tools), tools.schemas) == (0, [])
    assert Tools.of(Hotels())
    assert len(Tools.of(Hotels())) == 2


def test_get_tools_may_be_async_or_a_generator_or_return_a_tuple() -> None:
    class Async(Hotels):
        async def get_tools(self) -> list[Any]:  # type: ignore[override]
            await asyncio.sleep(0)
            return [self.search_hotels]

    class Generator(Hotels):
        def get_tools(self) -> Iterator[Any]:  # type: ignore[override]
            yield self.search_hotels

    class Tuple(Hotels):
        def get_tools(self) -> tuple[Any, ...]:  # type: ignore[override]
            return (self.search_hotels,)

    for owner in (Async(), Generator(), Tuple()):
        assert [each["function"]["name"] for each in Tools.of(owner).schemas] == ["search_hotels"]


class Kinds:
    def inherited(self, it: int) -> int:
        """Documented in the parent."""
        return it

    @staticmethod
    def static(it: int) -> int:
        return it

    @classmethod
    def of_class(cls, it: int) -> int:
        return it

    @functools.lru_cache  # noqa: B019
    def cached(self, it: int) -> int:
        return it

    def __call__(self, it: int) -> int:
        """Documented at the call."""
        return it


class Child(Kinds):
    def inherited(self, it: int) -> int:
        return it


def decorated() -> Callable[..., Any]:
    @functools.wraps(Kinds.static)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return Kinds.static(*args, **kwargs)

    return wrapper


def named(tool: Any, name: str = "tool") -> Any:
    tool.__name__ = name
    return tool


def add(first: int, it: int, key: str = "secret") -> int:
    """Add them."""
    return it if (first, key) == (1, "own") else -1


@pytest.mark.parametrize(
    ("tool", "about"),
    [
        (Child().inherited, "Documented in the parent."),
        (Kinds.static, ""),
        (Kinds().of_class, ""),
        (Kinds().cached, ""),
        (named(Kinds()), "Documented at the call."),
        (decorated(), ""),
        (named(functools.partial(add, 1, key="own")), "Add them."),
        (named(functools.update_wrapper(functools.partial(add, 1, key="own"), add)), "Add them."),
    ],
    ids=case_name,
)
def test_methods_functions_and_callable_objects_with_a_name_are_tools(tool: Any, about: str) -> None:
    tools = Tools.of(Owner(tool))
    function = tools.schemas[0]["function"]

    assert function["description"] == about
    assert function["parameters"]["properties"] == {"it": {"type": "integer"}}
    assert tools.run(ToolCall(function["name"], {"it": "3"}))[:2] == ("3", False)


def positional(a: int, /) -> None: ...
def several(*many: int) -> None: ...
def keywords(**many: int) -> None: ...
def of_a_type(it: int, client: NotDescribable) -> None: ...
def of_a_function(call: Callable[[], int]) -> None: ...


def unresolved() -> Callable[..., Any]:
    class Local: ...

    def tool(it: Local) -> None: ...

    return tool


def in_words(it: int) -> None: ...


in_words.__annotations__["it"] = "how many nights"


class ManyPositional:
    def many(*args: int) -> None: ...


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (positional, "positional: it takes a by position only\nRemove the `/`"),
        (several, "several: it takes *many\nGive each argument a name"),
        (ManyPositional().many, "many: it takes *args"),
        (keywords, "keywords: it takes **many\nGive each argument a name"),
        (math.sqrt, "sqrt: it takes x by position only"),
        (of_a_type, "of_a_type: its argument client cannot be described: Unable to generate"),
        (of_a_function, "of_a_function: its argument call cannot be described: Cannot generate"),
        (unresolved(), "tool: the hints of its arguments cannot be read: NameError: name 'Local' is not defined\n"),
        (in_words, "in_words: the hints of its arguments cannot be read: SyntaxError"),
        (lambda it: it, "<lambda>: it has no name to call it by\nWrite it as"),
        (functools.partial(add, 1), "it has no name to call it by"),
        (Kinds(), "it has no name to call it by"),
        (unittest.mock.Mock(), "it has no name to call it by"),
        (Kinds, "Kinds: neither a function or method nor a JSON schema\nList the methods themselves"),
        (Guest, "Guest: neither a function"),
        ("search_hotels", "'search_hotels': neither a function"),
        (None, "None: neither a function"),
        (5, "5: neither a function"),
    ],
    ids=case_name,
)  # fmt: skip
def test_what_cannot_be_a_tool_is_refused_by_name(tool: Any, message: str) -> None:
    assert f": {message}" in refusal(Owner(tool))


def test_two_tools_of_one_name_are_refused() -> None:
    hotels = Hotels()
    hotels.get_tools = lambda: [hotels.secret, {"name": "secret"}]  # type: ignore[method-assign]

    assert "secret: two tools have this name\nRename" in refusal(hotels)


@pytest.mark.parametrize("value", ["tools", None, {"a": 1}, add, 5, {add}], ids=case_name)
def test_get_tools_returns_a_list(value: Any) -> None:
    owner = Owner()
    owner._tools = value

    message = refusal(owner)
    assert message.startswith("Owner.get_tools returned ")
    assert f"({type(value).__name__})\nReturn a list of methods" in message


def test_get_tools_is_a_method() -> None:
    class Odd:
        get_tools = (add,)

    assert refusal(Odd()).startswith("Odd.get_tools is not a method\n")


def test_get_tools_that_raises_is_told_with_its_line() -> None:
    class Broken:
        def get_tools(self) -> list[Any]:
            return [self.search]  # type: ignore[attr-defined]

    class BrokenLater:
        def get_tools(self) -> Iterator[Any]:
            yield self.search  # type: ignore[attr-defined]

    for owner in (Broken(), BrokenLater()):
        message = refusal(owner)
        assert "get_tools raised: AttributeError" in message
        assert "self.search" in message


# -- answers


def test_what_a_tool_receives_are_python_values() -> None:
    hotels = Hotels()

    assert answer_of(hotels, "book_hotel", name="Inn", nights="3", arrival="2024-01-02") == ("null", False)
    assert answer_of(hotels, "book_hotel", name="Inn", nights=3.0, arrival=None) == ("null", False)
    assert hotels.booked == [("Inn", 3, date(2024, 1, 2)), ("Inn", 3, None)]
    assert type(hotels.booked[1][1]) is int


@pytest.mark.parametrize(
    ("hint", "value", "received"),
    [
        (int, "3", 3),
        (float, 3, 3.0),
        (bool, "true", True),
        (Board, "half", Board.half),
        (Guest, {"title": "Dr", "age": "7"}, Guest("Dr", 7)),
        (list[Guest], [{"title": "Dr"}], [Guest("Dr", 30)]),
        (Room, {"board": "half"}, Room(board=Board.half)),
        (Literal["a", 1], 1, 1),
        (int | None, None, None),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Any, {"x": [1]}, {"x": [1]}),
    ],
    ids=case_name,
)
def test_arguments_are_converted_to_the_type_of_the_hint(hint: Any, value: Any, received: Any) -> None:
    assert given(hint, value) == received
    assert type(given(hint, value)) is type(received)


@pytest.mark.parametrize(
    ("hint", "value", "error"),
    [
        (int, "three", "it: Input should be a valid integer, unable to parse string as an integer"),
        (int, 3.5, "it: Input should be a valid integer, got a number with a fractional part"),
        (int, None, "it: Input should be a valid integer"),
        (str, 5, "it: Input should be a valid string"),
        (float, "nan", "it: Input should be a finite number"),
        (float, "inf", "it: Input should be a finite number"),
        (Price, {"amount": "inf"}, "it.amount: Input should be a finite number"),
        (Board, "full", "it: Input should be 'none' or 'half'"),
        (Literal["a", "b"], "c", "it: Input should be 'a' or 'b'"),
        (date, "tomorrow", "it: Input should be a valid date"),
        (Guest, {"title": "Dr", "age": "old"}, "it.age: Input should be a valid integer"),
        (list[Guest], [{"title": "Dr"}, {}], "it.1.title: Field required"),
        (Annotated[int, Field(ge=1)], 0, "it: Input should be greater than or equal to 1"),
    ],
    ids=case_name,
)
def test_a_wrong_argument_is_told_to_the_model(hint: Any, value: Any, error: str) -> None:
    told = given(hint, value)

    assert told.startswith(f"error: tool: {error}")
    assert "pydantic" not in told


def test_a_null_where_null_is_the_default_is_taken_whatever_the_hint() -> None:
    def tool(it: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return repr(it)

    assert answer_of(Owner(tool), "tool", it=None) == ("None", False)
    assert answer_of(Owner(tool), "tool", it="x")[1]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("book_hotel", {"name": "Inn"}, "book_hotel: missing argument: nights"),
        ("book_hotel", {}, "book_hotel: missing argument: name; missing argument: nights"),
        ("search_hotels", {"city": "Bern", "foo": 1}, "search_hotels: unknown argument: foo"),
        ("search_hotels", {"citi": "Bern"},
         "search_hotels: missing argument: city; unknown argument: citi. Did you mean city?"),
        ("book_hotel", {"name": 5, "nights": "x", "foo": 1},
         "book_hotel: name: Input should be a valid string; nights: Input should be a valid integer, "
         "unable to parse string as an integer; unknown argument: foo"),
        ("serch_hotels", {},
         "there is no tool serch_hotels. Did you mean search_hotels? Tools: search_hotels, book_hotel"),
        ("xyz", {}, "there is no tool xyz. Tools: search_hotels, book_hotel"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_with_what_is_wrong(name: str, arguments: dict[str, Any], error: str) -> None:
    hotels = Hotels()

    assert answer_of(hotels, name, **arguments) == (f"error: {error}", True)
    assert hotels.booked == []


def test_a_call_that_could_not_be_read_is_answered_with_its_problem() -> None:
    (call,) = read_calls(tagged('{"name": "search_hotels", "arguments": {'))[1]

    answer, is_wrong, _ = Tools.of(Hotels()).run(call)

    assert is_wrong
    assert answer.startswith("error: the call is not valid JSON: Expecting property name")


def test_a_call_without_tools_says_that_there_are_none() -> None:
    assert Tools().run(ToolCall("a", {}))[:2] == ("error: there is no tool a. Tools: none", True)


@pytest.mark.parametrize(
    "name", ["secret", "get_tools", "booked", "__init__", "__class__", "search_hotels.__call__", "", "_tools"]
)
def test_only_what_is_listed_can_be_called(name: str) -> None:
    answer, is_wrong = answer_of(Hotels(), name)

    assert is_wrong
    assert answer.startswith(f"error: there is no tool {name}.")


@pytest.mark.parametrize(
    "call",
    [
        ToolCall(5, {}),  # type: ignore[arg-type]
        ToolCall(["search_hotels"], {}),  # type: ignore[arg-type]
        ToolCall("search_hotels", None),
        ToolCall("search_hotels", [1]),  # type: ignore[arg-type]
        ToolCall("search_hotels", {"city": "\ud800", "\ud800": 1}),
        ToolCall("\ud800" * 1000, {}),
        ToolCall("search_hotels", {"city": functools.reduce(lambda inner, _: [inner], range(10_000), [])}),
        ToolCall("search_hotels", {"x\n" * 1000: 1}),
    ],
    ids=lambda call: str(call.name)[:20],
)
def test_a_call_of_wrong_types_is_a_wrong_call(call: ToolCall) -> None:
    answer, is_wrong, _ = Tools.of(Hotels()).run(call)

    assert is_wrong
    assert answer.startswith("error: ")
    assert len(answer.encode()) <= 3 * MAX_ERROR
    assert "\n" not in answer


def test_an_error_is_short_whatever_the_call() -> None:
    many = [named(lambda: 1, f"tool_number_{number}") for number in range(200)]

    def tool(it: list[int], other: Any) -> None: ...

    tool.__annotations__["other"] = Literal[tuple(range(1000))]
    for owner, name in ((Owner(*many), "x" * 5000), (Owner(tool), "tool")):
        answer, is_wrong = answer_of(owner, name, it=["x"] * 5000, other=-1, **{f"x{n}": 1 for n in range(1000)})
        assert is_wrong
        assert len(answer) <= MAX_ERROR


def test_what_a_tool_raises_is_raised() -> None:
    class Broken:
        def get_tools(self) -> list[Any]:
            return [self.now, self.later, self.validating]

        def now(self, it: int) -> None:
            raise KeyError(it)

        async def later(self, it: int) -> None:
            raise KeyError(it)

        def validating(self, it: int) -> None:
            Guest(*())  # a TypeError, as of a wrong call

    for name, kind in (("now", KeyError), ("later", KeyError), ("validating", TypeError)):
        with pytest.raises(kind):
            answer_of(Broken(), name, it=1)
        assert answer_of(Broken(), name, it="x")[1]


def test_a_validation_error_inside_a_tool_is_not_the_model_s() -> None:
    def tool() -> None:
        Room.model_validate({"board": 5})

    with pytest.raises(ValueError, match="validation error for Room"):
        answer_of(Owner(tool), "tool")


def test_a_tool_that_changes_its_arguments_does_not_change_the_call() -> None:
    def tool(it: dict, other: Any) -> None:  # type: ignore[type-arg]
        it.clear()
        other.append(1)

    call = ToolCall("tool", {"it": {"x": 1}, "other": []})
    Tools.of(Owner(tool)).run(call)
    assert call.arguments == {"it": {"x": 1}, "other": []}


def test_a_default_is_left_to_the_function() -> None:
    missing = object()

    def tool(it: Any = missing) -> str:
        return str(it is missing)

    def other(it: Annotated[int, Field(3)] = 5) -> int:
        return it

    assert answer_of(Owner(tool), "tool") == ("True", False)
    assert answer_of(Owner(other), "other") == ("5", False)


def test_tools_of_two_episodes_are_apart() -> None:
    first, second = Hotels(), Hotels()
    tools = Tools.of(first), Tools.of(second)

    tools[1].run(ToolCall("book_hotel", {"name": "Inn", "nights": 1}))

    assert (len(first.booked), len(second.booked)) == (0, 1)
    assert tools[0].schemas == tools[1].schemas


def test_the_methods_of_many_episodes_are_described_once() -> None:
    Tools.of(Hotels())
    before = describe_function.cache_info().misses
    for _ in range(100):
        Tools.of(Hotels())

    assert describe_function.cache_info().misses == before


@dataclass
class Bill:
    total: float
    guest: Guest
    items: list[Any] = field(default_factory=list)


class Odd:
    def __str__(self) -> str:
        return "an odd thing"


class Word(str, enum.Enum):  # noqa: UP042
    yes = "yes"


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Zürich\n2", "Zürich\n2"),
        ("", ""),
        (None, "null"),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        ({"city": "Zürich", "n": None}, '{"city": "Zürich", "n": null}'),
        ([1, "a", (2,)], '[1, "a", [2]]'),
        (Bill(1.5, Guest("Dr"), [Odd()]),
         '{"total": 1.5, "guest": {"title": "Dr", "age": 30}, "items": ["an odd thing"]}'),
        (Room(), '{"guests": [], "board": "none"}'),
        (date(2024, 1, 2), "2024-01-02"),
        ([date(2024, 1, 2)], '["2024-01-02"]'),
        ({date(2024, 1, 2): Board.half}, '{"2024-01-02": "half"}'),
        ({(1, 2): 3}, '{"1,2": 3}'),
        (Board.half, "half"),
        (Word.yes, "yes"),
        (Odd(), "an odd thing"),
        (b"bytes", "bytes"),
        (b"\xff", "b'\\xff'"),
        (CIRCLE, "[[...]]"),
        (math.nan, "NaN"),
        ("half \ud800 a character, \ud83d\ude00", "half \ufffd a character, 😀"),
        ({"a": ["\udc00"]}, '{"a": ["\ufffd"]}'),
        ({"\ud800": ["\udc00"]}, "{'\\ud800': ['\\udc00']}"),
    ],
    ids=case_name,
)  # fmt: skip
def test_what_a_tool_returns_is_told_as_text(value: Any, text: str) -> None:
    assert returned(value) == text
    returned(value).encode()


# -- schemas of the user's own


INNER: dict[str, Any] = {
    "name": "search",
    "description": "Find it.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Bern", "Zürich"]},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "flag": {"type": "boolean"},
            "many": {"type": "array"},
            "maybe": {"type": ["string", "null"]},
            "nullable": {"type": "integer", "nullable": True},
            "any": {},
            "own": {"type": "of my own"},
        },
        "required": ["city"],
    },
    "strict": True,
}


class WithSchema:
    def __init__(self, schema: Any = INNER) -> None:
        self.schema = schema

    def get_tools(self) -> list[Any]:
        return [self.schema]

    def search(self, city: str, **others: Any) -> Any:
        return [city, others]

    def narrow(self, city: str, n: int) -> Any:
        return [city, n]


@pytest.mark.parametrize("schema", [INNER, {"function": INNER}, {"type": "function", "function": INNER}])
def test_a_schema_is_passed_on_unchanged_in_the_full_form(schema: Any) -> None:
    tools = Tools.of(WithSchema(schema))

    assert tools.schemas == [{"type": "function", "function": INNER}]
    assert tools.run(ToolCall("search", {"city": "Bern", "n": 2}))[:2] == ('["Bern", {"n": 2}]', False)


@pytest.mark.parametrize(
    "arguments",
    [{"n": 1}, {"x": 1}, {"x": 1.5}, {"flag": True}, {"many": []}, {"maybe": None}, {"maybe": "x"}, {"nullable": None},
     {"nullable": 1}, {"any": {"x": 1}}, {"own": 1}, {"own": True}],
    ids=case_name,
)  # fmt: skip
def test_arguments_that_fit_the_schema_are_passed_on_as_they_are(arguments: dict[str, Any]) -> None:
    answer, is_wrong = answer_of(WithSchema(), "search", city="Bern", **arguments)

    assert not is_wrong
    assert json.loads(answer) == ["Bern", arguments]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "missing argument: city"),
        ({"city": "Basel"}, 'city: should be one of ["Bern", "Zürich"]'),
        ({"city": 5}, "city: should be of type string"),
        ({"city": "Bern", "n": "1"}, "n: should be of type integer"),
        ({"city": "Bern", "n": True}, "n: should be of type integer"),
        ({"city": "Bern", "n": 1.0}, "n: should be of type integer"),
        ({"city": "Bern", "n": None}, "n: should be of type integer"),
        ({"city": "Bern", "x": False}, "x: should be of type number"),
        ({"city": "Bern", "flag": 1}, "flag: should be of type boolean"),
        ({"city": "Bern", "many": {}}, "many: should be of type array"),
        ({"city": "Bern", "maybe": 5}, "maybe: should be of type string or null"),
        ({"city": "Bern", "manny": 5}, "unknown argument: manny. Did you mean many?"),
        ({"n": "1", "foo": 5}, "n: should be of type integer; missing argument: city; unknown argument: foo"),
    ],
    ids=case_name,
)
def test_arguments_that_do_not_fit_the_schema_are_a_wrong_call(arguments: dict[str, Any], error: str) -> None:
    assert answer_of(WithSchema(), "search", **arguments) == (f"error: search: {error}", True)


def test_a_schema_may_allow_other_arguments() -> None:
    schema = {
        "name": "search",
        "parameters": {"properties": {"city": {}}, "required": ["city"], "additionalProperties": True},
    }

    assert answer_of(WithSchema(schema), "search", city="Bern", foo=1) == ('["Bern", {"foo": 1}]', False)


PROPERTIES = {"city": {"type": "string"}, "n": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"name": 5}, 'the schema has no "name"'),
        ({}, '{}: the schema has no "name"'),
        ({"type": "function", "function": "search"}, 'the schema has no "name"'),
        ({"name": "search", "parameters": [1]}, "search: its parameters are not"),
        ({"name": "search", "parameters": {"properties": ["city"]}}, "search: its parameters are not"),
        ({"name": "search", "parameters": {"properties": {"city": "string"}}}, "search: its parameters are not"),
        ({"name": "search", "parameters": {"properties": {}, "required": "city"}}, 'search: "required" of its'),
        ({"name": "search", "parameters": {"properties": {}, "required": ["city"]}}, 'search: "required" of its'),
        ({"name": "search", "parameters": {"properties": {"city": {"enum": {Odd}}}}}, "the schema holds something"),
        ({"name": "narrow", "parameters": {"properties": PROPERTIES, "required": ["city"]}},
         "narrow: the schema does not fit the method: missing a required argument: 'n'\nMake"),
        ({"name": "narrow", "parameters": {"properties": {**PROPERTIES, "m": {}}, "required": ["city", "n"]}},
         "narrow: the schema does not fit the method: got an unexpected keyword argument 'm'"),
    ],
    ids=case_name,
)  # fmt: skip
def test_a_schema_that_does_not_fit_is_refused(schema: Any, message: str) -> None:
    assert message in refusal(WithSchema(schema))


def test_schemas_that_name_no_methods_are_shown_and_not_run() -> None:
    tools = Tools.of(WithSchema({"name": "nowhere", "parameters": {"properties": PROPERTIES}}))

    assert tools.schemas[0]["function"]["name"] == "nowhere"
    assert tools.are_only_shown
    assert len(tools) == 0


@pytest.mark.parametrize("name", ["nowhere", "schema"])
def test_a_schema_without_a_method_beside_tools_that_have_one_is_refused(name: str) -> None:
    class Mixed(WithSchema):
        def get_tools(self) -> list[Any]:
            return [INNER, {"name": name}]

    assert f"{name}: the schema names no method of Mixed, but other schemas do" in refusal(Mixed())
    assert "names no method" in refusal(Owner(WithSchema().narrow, {"name": name}))
