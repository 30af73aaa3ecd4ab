"""The tools of an environment: shown to the model as JSON schemas, called by it as text, and run with Python values.

The result of a wrong call is an error message for the model; an exception in a tool is a failure of the environment.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pydantic_core import to_jsonable_python

from aitrain.environment.contract import ToolResult
from aitrain.environment.function_tool import tool_of_function
from aitrain.environment.schema_tool import function_part, method_for, shown_tool, tool_of_schema
from aitrain.environment.tool_call_parser import TOO_DEEP, ToolCall, ToolJson, clean, is_deep, short
from aitrain.environment.tool_schema import InvalidToolError, Tool
from aitrain.errors import EnvironmentFailed, did_you_mean
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.user_code import failure_message

MAX_ERROR = 500
"""Maximum length of the error message for a wrong call, in characters: it takes space in the model's context."""


class ToolOutcome(NamedTuple):
    """What came of a call: the result as text, or an error message for the model if the call `is_wrong`."""

    text: str
    is_wrong: bool = False
    ends_episode: bool = False


@dataclass(frozen=True)
class ToolOffer:
    """The tools of an environment that runs elsewhere: schemas of those that it runs, and of the others."""

    run: tuple[ToolJson, ...] = ()
    shown: tuple[ToolJson, ...] = ()
    of_schemas: bool = True


class Tools:
    """The tools of an environment or of one episode; `schemas` are passed to the chat template.

    If no schema names a method, the schemas are only shown to the model, and the environment parses the calls itself:
    `len` is then 0.
    """

    def __init__(self, tools: Iterable[Tool] = (), shown: Iterable[ToolJson] = (), of_schemas: bool = True) -> None:
        self._tools, self._shown = {tool.name: tool for tool in tools}, list(shown)
        self.schemas: list[ToolJson] = [*(tool.schema for tool in self._tools.values()), *self._shown]
        self.of_schemas = of_schemas
        """Whether get_tools returned only JSON schemas, which string prompts ignore."""

    @property
    def offer(self) -> ToolOffer:
        """The tools for a process that does not have the environment."""
        return ToolOffer(tuple(tool.schema for tool in self._tools.values()), tuple(self._shown), self.of_schemas)

    @classmethod
    def offered(cls, offer: ToolOffer) -> Tools:
        """The tools of an environment that runs elsewhere; they cannot be run here."""
        return cls((_elsewhere(schema) for schema in offer.run), offer.shown, offer.of_schemas)

    @property
    def are_only_shown(self) -> bool:
        """Whether the environment parses and runs the calls itself."""
        return bool(self.schemas) and not self._tools

    @classmethod
    def of(cls, owner: object, runs_calls: bool = True) -> Tools:
        """The tools that `owner.get_tools()` returns; none if it has no such method. Without `runs_calls` the
        environment gets the calls itself, and schemas need not name methods.

        Raises:
            EnvironmentFailed: the method raised, or returned what cannot be tools.
        """
        if isinstance(offered := getattr(owner, "offered_tools", None), cls):
            return offered
        place = f"{type(owner).__name__}.get_tools"
        found: dict[str, Tool] = {}
        items = _listed(owner, place)
        only_shown = not runs_calls or all(isinstance(item, dict) and method_for(item, owner) is None for item in items)
        for item in items:
            try:
                tool = shown_tool(item) if only_shown and isinstance(item, dict) else _tool(item, owner)
                if tool.name in found:
                    raise InvalidToolError("two tools have this name\nRename one of them.")
            except InvalidToolError as error:
                named = function_part(item).get("name") if isinstance(item, dict) else getattr(item, "__name__", None)
                label = short(named if isinstance(named, str) and named else repr(item))
                raise EnvironmentFailed(f"{place}: {label}: {error}") from None
            found[tool.name] = tool
        of_schemas = all(isinstance(item, dict) for item in items)
        if only_shown:
            return cls(shown=[tool.schema for tool in found.values()], of_schemas=of_schemas)
        return cls(found.values(), of_schemas=of_schemas)

    def __len__(self) -> int:
        return len(self._tools)

    def run(self, call: ToolCall) -> ToolOutcome:
        """Run a call, or find out what is wrong with it.

        A result that is text is returned unchanged; any other is written as JSON. Exceptions of the tool are raised,
        as are those of a user-defined type's validation other than ValueError.
        """
        tool, named = self._tools.get(str(call.name)), short(str(call.name))
        problem = call.problem
        if not problem and not isinstance(call.arguments, dict):  # arguments that did not come from read_calls
            problem = "the arguments are not a JSON object"
        elif not problem and is_deep(call.arguments):
            problem = TOO_DEEP
        if problem or tool is None:
            near, names = did_you_mean(named, self._tools), ", ".join(self._tools) or "none"
            return _wrong(problem or f"there is no tool {named}.{near} Tools: {names}")
        values, problems = tool.read(copy.deepcopy(call.arguments or {}))  # a tool may change what it is given
        if problems:
            return _wrong(f"{tool.name}: {'; '.join(short(problem, 200) for problem in problems)}")
        result = run_if_async(tool.run(**values))
        if isinstance(result, ToolResult):
            return ToolOutcome(_as_text(result.content), ends_episode=bool(result.done))
        return ToolOutcome(_as_text(result))


def _elsewhere(schema: ToolJson) -> Tool:
    return Tool(function_part(schema)["name"], schema, lambda: None, lambda given: (given, []))


def _wrong(problem: str) -> ToolOutcome:
    return ToolOutcome(clean(short(f"error: {problem}", MAX_ERROR)), is_wrong=True)


def _as_text(result: object) -> str:
    """What a tool returned, as the model reads it."""
    plain = result.value if isinstance(result, Enum) else result
    try:
        plain = to_jsonable_python(plain, fallback=str)
    except ValueError:  # a list that holds itself, bytes that are no text
        plain = str(plain)
    return clean(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))


# -- from what get_tools returned


def _listed(owner: object, place: str) -> list[object]:
    get_tools = getattr(owner, "get_tools", None)
    if get_tools is None:
        return []
    if not callable(get_tools):
        raise EnvironmentFailed(f"{place} is not a method\nWrite `def get_tools(self)`, which returns a list.")
    try:
        found = run_if_async(get_tools())
        found = list(found) if isinstance(found, (tuple, Iterator)) else found
    except Exception as error:
        raise EnvironmentFailed(failure_message(f"{place} raised", error)) from error
    if not isinstance(found, list):
        returned = f"{short(repr(found))} ({type(found).__name__})"
        raise EnvironmentFailed(f"{place} returned {returned}\nReturn a list of methods; [] is no tools.")
    return found


def _tool(item: object, owner: object) -> Tool:
    if isinstance(item, dict):
        return tool_of_schema(item, owner)
    if not callable(item) or inspect.isclass(item):
        raise InvalidToolError(
            "neither a function or method nor a JSON schema\nList the methods themselves: [self.search]"
        )
    return tool_of_function(item)
