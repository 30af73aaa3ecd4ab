"""The tools of an environment: shown to the model as JSON schemas, called by it as text, and run with Python values.

The result of a wrong call is an error message for the model; an exception in a tool is a failure of the environment.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ConfigDict, ValidationError
from pydantic.experimental.arguments_schema import generate_arguments_schema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, to_jsonable_python

from aitrain.environment.completion_parser import ToolCall, ToolJson, clean, short
from aitrain.environment.contract import ToolResult
from aitrain.errors import EnvironmentFailed
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.user_code import users_errors

MAX_ERROR = 500
"""Maximum length of the error message for a wrong call, in characters: it takes space in the model's context."""


@dataclass(frozen=True)
class Tool:
    """One tool. `read` turns the model's arguments into keyword arguments for `run`, and raises ValidationError."""

    name: str
    schema: ToolJson
    run: Callable[..., object] = lambda **_: None
    read: Callable[[ToolJson], ToolJson] = lambda given: given


class ToolOutcome(NamedTuple):
    """What came of a call: the result as text, or an error message for the model if the call `is_wrong`."""

    text: str
    is_wrong: bool = False
    ends_episode: bool = False


@dataclass(frozen=True)
class Tools:
    """The tools of an environment or of one episode; `schemas` are passed to the chat template.

    If no schema names a method, they `are_only_shown` to the model, and the environment parses and runs the calls
    itself: `len` is then 0.
    """

    schemas: list[ToolJson] = field(default_factory=list)
    are_only_shown: bool = False
    of_schemas: bool = True
    """Whether get_tools returned only JSON schemas, which string prompts ignore."""
    by_name: dict[str, Tool] = field(default_factory=dict)
    """Empty in a process that does not have the environment, where they cannot be run."""

    @classmethod
    def of(cls, owner: object, runs_calls: bool = True) -> Tools:
        """The tools that `owner.get_tools()` returns; none if it has no such method. Without `runs_calls` the
        environment gets the calls itself, and schemas need not name methods.

        Raises:
            EnvironmentFailed: the method raised, or returned what cannot be tools.
        """
        if isinstance(offered := getattr(owner, "offered_tools", None), cls):
            return offered
        place, get_tools = f"{type(owner).__name__}.get_tools", getattr(owner, "get_tools", list)
        with users_errors(f"{place} raised"):
            items = list(run_if_async(get_tools()))
        found: dict[str, Tool] = {}
        only_shown = not runs_calls or all(isinstance(item, dict) and _method(item, owner) is None for item in items)
        for item in items:
            try:
                if not isinstance(item, dict):
                    tool = _tool_of_function(item)
                else:
                    tool = shown_tool(item) if only_shown else _tool_of_schema(item, owner)
                if tool.name in found:
                    raise ValueError("two tools have this name\nRename one of them.")
            except ValueError as error:
                named = function_part(item).get("name") if isinstance(item, dict) else getattr(item, "__name__", "")
                raise EnvironmentFailed(f"{place}: {short(str(named or repr(item)))}: {error}") from None
            found[tool.name] = tool
        schemas = [tool.schema for tool in found.values()]
        return cls(schemas, only_shown and bool(found), all(isinstance(item, dict) for item in items), found)

    def __len__(self) -> int:
        return 0 if self.are_only_shown else len(self.schemas)

    def run(self, call: ToolCall) -> ToolOutcome:
        """Run a call, or find out what is wrong with it.

        A result that is text is returned unchanged; any other is written as JSON. Exceptions of the tool are raised,
        as are those of a user-defined type's validation other than ValueError.
        """
        tool = self.by_name.get(call.name)
        if call.problem:
            return _wrong(call.problem)
        if tool is None:
            return _wrong(f"there is no tool {short(call.name)}. Tools: {', '.join(self.by_name) or 'none'}")
        try:
            values = tool.read(copy.deepcopy(call.arguments or {}))  # a tool may change what it is given
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
            return _wrong(f"{tool.name}: {'; '.join(short(problem, 200) for problem in problems)}")
        result = run_if_async(tool.run(**values))
        if isinstance(result, ToolResult):
            return ToolOutcome(_as_text(result.content), ends_episode=bool(result.done))
        return ToolOutcome(_as_text(result))


def _wrong(problem: str) -> ToolOutcome:
    return ToolOutcome(clean(short(f"error: {problem}", MAX_ERROR)), is_wrong=True)


def _as_text(result: object) -> str:
    """What a tool returned, as the model reads it."""
    try:
        plain = to_jsonable_python(result, fallback=str)
    except ValueError:  # a list that holds itself, bytes that are no text
        plain = str(result)
    return clean(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))


# -- tools that are functions


def _tool_of_function(function: Any) -> Tool:
    """The tool that calls a function or method.

    Raises:
        ValueError: a model could not call it by name, or JSON cannot describe its arguments.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier() or inspect.isclass(function):
        raise ValueError(
            "neither a JSON schema nor a function or method with a name\nList the methods themselves: [self.search]"
        )
    described = _described(getattr(function, "__func__", function), inspect.ismethod(function))
    schema = {"name": name, "description": described.description, "parameters": described.parameters}
    return Tool(name, {"type": "function", "function": schema}, function, described.read)


class _ToolSchema(GenerateJsonSchema):
    """Leaves out titles, and defaults that JSON cannot hold, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as pydantic has it

    def field_title_should_be_set(self, schema: object) -> bool:
        """Whether a field has a title."""
        return False


@dataclass(frozen=True)
class _Described:
    """What the signature and the docstring of a function say."""

    description: str
    parameters: ToolJson
    """The JSON schema of its parameters."""
    validator: SchemaValidator
    """Checks and converts the arguments of a call by the hints."""
    nullable: Collection[str]
    """Parameters whose default is None: null is the default, for every hint."""

    def read(self, given: ToolJson) -> ToolJson:
        """Keyword arguments for the function, from those that the model gave."""
        known = {name: value for name, value in given.items() if value is not None or name not in self.nullable}
        keywords: ToolJson = self.validator.validate_python(known)[1]
        return keywords


@functools.lru_cache(maxsize=256)  # the objects of different episodes have the same methods
def _described(function: Any, is_bound: bool) -> _Described:
    """The description of a function; `is_bound`: its first parameter is `self`.

    Raises:
        ValueError: a model could not call it by name, or JSON cannot describe its arguments.
    """
    function = inspect.unwrap(function)
    strict = ConfigDict(allow_inf_nan=False)
    try:
        core = generate_arguments_schema(
            function, "arguments", lambda place, *_: "skip" if is_bound and place == 0 else None, strict
        )
        schema, validator = _ToolSchema().generate(core), SchemaValidator(core, {"allow_inf_nan": False})
    except Exception as error:
        raise ValueError(
            f"its arguments cannot be described: {short(str(error), 200)}\nHint them with int, str, list[...],"
            " Literal[...], a dataclass or a pydantic model, which the module defines or imports at its top."
        ) from None
    description, texts = _read_docstring(inspect.getdoc(function) or "")
    if "properties" not in schema:
        raise ValueError("it takes arguments by position only\nRemove the `/` or the `*`: a model gives names.")
    for name, each in schema["properties"].items():
        if texts.get(name):
            each.setdefault("description", texts[name])
    shown = {"type": "object", "required": [], **schema}
    shown.pop("additionalProperties", None)  # there is none with `**rest`
    nullable = [name for name, one in inspect.signature(function).parameters.items() if one.default is None]
    return _Described(description, shown, validator, nullable)


_SECTION = re.compile(r"^(?:Args|Arguments|Parameters|Params|Returns?|Raises|Yields):|^:\w", re.MULTILINE)
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters|Params):[ \t]*\n((?:[ \t].*\n?|\n)*)", re.MULTILINE)
_TEXT = r":(.*(?:\n[ \t]+.*)*)"  # with the lines that are indented further
_ITEM = re.compile(r"^(\w+)[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?[ \t]*" + _TEXT, re.MULTILINE)
_PARAM = re.compile(r"^:param\s(?:[^:]*\s)?(\w+)" + _TEXT, re.MULTILINE)


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each argument, from Google's `Args:` or `:param name: text`."""
    about = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", _SECTION.split(doc)[0])]
    section = _ARGS.search(doc)
    items = _ITEM.findall(textwrap.dedent(section[1]) if section else "") + _PARAM.findall(doc)
    return "\n".join(about).strip(), {name: " ".join(text.split()) for name, text in items}


# -- tools that are JSON schemas


def function_part(item: ToolJson) -> ToolJson:
    """The part of a schema that has name, description and parameters."""
    inner = item.get("function")
    return inner if isinstance(inner, dict) else item


def _method(item: ToolJson, owner: object) -> Callable[..., object] | None:
    """The method that a schema names."""
    name = function_part(item).get("name")
    method = getattr(owner, name, None) if isinstance(name, str) else None
    return method if callable(method) else None


def shown_tool(item: ToolJson) -> Tool:
    """A tool that is shown to the model and not run: the environment parses its calls.

    Raises:
        ValueError: it is no schema of a function.
    """
    inner = function_part(item)
    name, parameters = inner.get("name"), inner.get("parameters") or {}
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise ValueError("it is no schema of a function\nGive it a name, and as parameters a JSON schema.")
    return Tool(name, {"type": "function", **(item if inner is not item else {"function": item})})


def _tool_of_schema(item: ToolJson, owner: object) -> Tool:
    """The tool that calls the method named by a schema; the method's hints check the arguments.

    Raises:
        ValueError: there is no such method, or the schema does not fit it.
    """
    method = _method(item, owner)
    if method is None:
        raise ValueError(
            f"the schema names no method of {type(owner).__name__}, but other schemas do\n"
            "Use the method's name as the schema's name. If no schema names a method, the model is shown them all, and"
            " the environment parses the calls itself."
        )
    shown, parameters = shown_tool(item), function_part(item).get("parameters") or {}
    try:
        inspect.signature(method).bind(**parameters.get("properties", {}))
    except TypeError as error:
        raise ValueError(f"the schema does not fit the method: {error}\nMake their arguments the same.") from None
    described = _described(getattr(method, "__func__", method), inspect.ismethod(method))
    return Tool(shown.name, shown.schema, method, described.read)
