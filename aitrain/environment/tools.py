"""The tools of an environment: shown to the model as JSON schemas, called by it as text, and run with Python values.

A wrong call is answered with an error for the model to read; what a tool raises is the environment's own failure.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from aitrain.environment.calls import TOO_DEEP, ToolCall, clean, is_deep, short
from aitrain.environment.contract import finished
from aitrain.environment.loader import failure_message
from aitrain.errors import EnvironmentFailed, did_you_mean

MAX_ERROR = 500
"""How long the error for a wrong call may be: it takes room in the model's context."""


@dataclass(frozen=True)
class _Tool:
    """`read` makes of the model's arguments what `run` takes, and a list of what is wrong with them."""

    name: str
    schema: dict[str, Any]
    run: Callable[..., Any]
    read: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]


class Tools:
    """The tools of an environment, or of one episode of it; `schemas` are theirs for the chat template.

    Where the schemas name no methods, the model is shown them, and the environment reads the calls in its answers
    itself: there is nothing to run, and `len` is 0.
    """

    def __init__(
        self, tools: Iterable[_Tool] = (), shown: Iterable[dict[str, Any]] = (), of_schemas: bool = True
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas: list[dict[str, Any]] = [*(tool.schema for tool in self._tools.values()), *shown]
        self.of_schemas = of_schemas
        """Whether get_tools returned JSON schemas only: prompts that are strings do without them."""

    @property
    def are_only_shown(self) -> bool:
        """Whether calls are left to the environment."""
        return bool(self.schemas) and not self._tools

    @classmethod
    def of(cls, owner: Any) -> Tools:
        """What `owner.get_tools()` returns; no tools where there is no such method.

        Raises:
            EnvironmentFailed: the method raised, or returned what cannot be tools.
        """
        place = f"{type(owner).__name__}.get_tools"
        found: dict[str, _Tool] = {}
        items = _listed(owner, place)
        only_shown = all(isinstance(item, dict) and _method_for(item, owner) is None for item in items)
        for item in items:
            try:
                tool = _shown(item) if only_shown else _tool(item, owner)
                if tool.name in found:
                    raise _Unusable("two tools have this name\nRename one of them.")
            except _Unusable as error:
                raise EnvironmentFailed(f"{place}: {_label(item)}: {error}") from None
            found[tool.name] = tool
        if only_shown:
            return cls(shown=[tool.schema for tool in found.values()])
        return cls(found.values(), of_schemas=all(isinstance(item, dict) for item in items))

    def __len__(self) -> int:
        return len(self._tools)

    def answer(self, call: ToolCall) -> tuple[str, bool]:
        """The tool's answer as text, and whether the call was wrong, so that it is an error for the model to read.

        Text is passed on as it is, None is "null", and everything that JSON can hold is JSON. What the tool raises, or
        the validation of a type of the user's own (other than ValueError), is raised.
        """
        problem = call.problem or _unusable(call.arguments)
        tool = self._tools.get(str(call.name))
        if problem or tool is None:
            return _error(problem or self._no_tool(str(call.name))), True
        values, problems = tool.read(copy.deepcopy(call.arguments or {}))  # a tool may change what it is given
        if problems:
            return _error(f"{tool.name}: {'; '.join(short(problem, 200) for problem in problems)}"), True
        return _as_text(finished(tool.run(**values))), False

    def _no_tool(self, name: str) -> str:
        near = did_you_mean(short(name), self._tools)
        return f"there is no tool {short(name)}.{near} Tools: {', '.join(self._tools) or 'none'}"


def _unusable(arguments: Any) -> str:
    """What is wrong with arguments that did not come from read_calls."""
    if not isinstance(arguments, dict):
        return "the arguments are not a JSON object"
    return TOO_DEEP if is_deep(arguments) else ""


def _error(problem: str) -> str:
    return clean(short(f"error: {problem}", MAX_ERROR))


def _as_text(result: Any) -> str:
    """What a tool returned, as the model reads it."""
    plain = result.value if isinstance(result, Enum) else result
    try:
        plain = to_jsonable_python(plain, fallback=str)
    except ValueError:  # a list that holds itself, bytes that are no text
        plain = str(plain)
    return clean(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))


# -- from what get_tools returned


class _Unusable(Exception):
    """Why something that get_tools returned cannot be a tool, and what to do."""


def _listed(owner: Any, place: str) -> list[Any]:
    get_tools = getattr(owner, "get_tools", None)
    if get_tools is None:
        return []
    if not callable(get_tools):
        raise EnvironmentFailed(f"{place} is not a method\nWrite `def get_tools(self)`, which returns a list.")
    try:
        found = finished(get_tools())
        found = list(found) if isinstance(found, (tuple, Iterator)) else found
    except Exception as error:
        raise EnvironmentFailed(failure_message(f"{place} raised", error)) from error
    if not isinstance(found, list):
        returned = f"{short(repr(found))} ({type(found).__name__})"
        raise EnvironmentFailed(f"{place} returned {returned}\nReturn a list of methods; [] is no tools.")
    return found


def _tool(item: Any, owner: Any) -> _Tool:
    if isinstance(item, dict):
        return _tool_of_schema(item, owner)
    if not callable(item) or inspect.isclass(item):
        raise _Unusable("neither a function or method nor a JSON schema\nList the methods themselves: [self.search]")
    return _tool_of_callable(item)


def _label(item: Any) -> str:
    """What a message calls it."""
    name = _inner(item).get("name") if isinstance(item, dict) else getattr(item, "__name__", None)
    return short(name if isinstance(name, str) and name else repr(item))


# -- tools that are functions


_Source = Callable[..., Any]
_NOTHING = inspect.Parameter.empty


@dataclass(frozen=True)
class _Argument:
    """One argument of a function: how it is checked, and what is shown of it."""

    name: str
    adapter: TypeAdapter[Any]
    default: Any
    schema: dict[str, Any]
    defs: dict[str, Any]

    @property
    def is_required(self) -> bool:
        """Neither the function nor a pydantic `Field` has a default."""
        return self.default is _NOTHING and self.adapter.get_default_value() is None


def _tool_of_callable(tool: _Source) -> _Tool:
    name = getattr(tool, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise _Unusable("it has no name that a model could call\nWrite it as a method or a function, with def.")
    source = tool.__func__ if inspect.ismethod(tool) else tool
    describe = _described if inspect.isfunction(source) else _described.__wrapped__
    about, arguments = describe(source, inspect.ismethod(tool))
    schema = {"name": name, "description": about, "parameters": _parameters_schema(arguments)}
    return _Tool(name, {"type": "function", "function": schema}, tool, functools.partial(_converted, arguments))


@functools.lru_cache(maxsize=256)  # each episode has an object of its own, with the same methods
def _described(source: _Source, is_bound: bool) -> tuple[str, list[_Argument]]:
    """The description of a function, and of each of its arguments."""
    parameters = _parameters(source, is_bound)
    names = {parameter.name for parameter in parameters}
    hints = _hints(source, names)
    about, told = _read_docstring(inspect.getdoc(_callee(source)) or "")
    return about, [_argument(each, hints.get(each.name, Any), told.get(each.name, "")) for each in parameters]


def _callee(source: _Source) -> _Source:
    """The function that is called in the end: it has the hints and the docstring."""
    if isinstance(source, functools.partial):
        return _callee(source.func)
    is_function = inspect.isroutine(source) or hasattr(source, "__wrapped__")
    return source if is_function else type(source).__call__


_NOT_NAMED = {
    inspect.Parameter.POSITIONAL_ONLY: "it takes {} by position only\nRemove the `/`: a model gives arguments by name.",
    inspect.Parameter.VAR_POSITIONAL: "it takes *{}\nGive each argument a name, or make it one list.",
    inspect.Parameter.VAR_KEYWORD: "it takes **{}\nGive each argument a name, or make it one dict.",
}


def _parameters(source: _Source, is_bound: bool) -> list[inspect.Parameter]:
    """What a call may give: not the `self` of a method, nor what a functools.partial gives already."""
    is_partial = isinstance(source, functools.partial)
    try:
        found = list(inspect.signature(source, follow_wrapped=not is_partial).parameters.values())
    except (TypeError, ValueError):
        raise _Unusable("Python does not tell its arguments\nCall it from a function of your own.") from None
    given = source.keywords if isinstance(source, functools.partial) else {}
    has_self = is_bound and found and found[0].kind is not inspect.Parameter.VAR_POSITIONAL
    found = [parameter for parameter in found[bool(has_self) :] if parameter.name not in given]
    for parameter in found:
        if parameter.kind in _NOT_NAMED:
            raise _Unusable(_NOT_NAMED[parameter.kind].format(parameter.name))
    return found


def _hints(source: _Source, names: set[str]) -> dict[str, Any]:
    """Of the arguments only: what is returned may be hinted with what is not imported."""
    callee = _callee(source)

    def carrier() -> None: ...

    known = getattr(callee, "__annotations__", {})
    carrier.__annotations__ = {name: hint for name, hint in known.items() if name in names}
    try:
        place = getattr(inspect.unwrap(callee), "__globals__", {})
        return get_type_hints(carrier, globalns=place, include_extras=True)
    except Exception as error:
        told = short(f"{type(error).__name__}: {error}", 200)
        what = "Define or import what the hints name at the top of the module."
        raise _Unusable(f"the hints of its arguments cannot be read: {told}\n{what}") from None


def _argument(parameter: inspect.Parameter, hint: Any, told: str) -> _Argument:
    default = parameter.default
    if isinstance(default, FieldInfo):
        hint, default = Annotated[hint, default], _NOTHING
    try:
        adapter = _adapter(hint)
        schema, defs = _flattened(adapter.json_schema(schema_generator=_QuietSchema))
    except Exception as error:
        why = short(re.split(r"\n|\. ", str(error))[0], 200)
        what = "Hint it with int, str, list[...], Literal[...], a dataclass or a pydantic model."
        raise _Unusable(f"its argument {parameter.name} cannot be described: {why}\n{what}") from None
    about = _about(hint) or told
    schema |= {"description": about} if about else {}
    schema |= {"default": to_jsonable_python(default)} if _is_json(default) else {}
    return _Argument(parameter.name, adapter, default, schema, defs)


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """No infinity by way of "inf" either; types with a configuration of their own refuse another."""
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        return TypeAdapter(hint)


def _about(hint: Any) -> str:
    """The text of `Annotated[int, "text"]`, of a pydantic `Field(description="text")`, or of either `| None`."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    for each in (hint, *members):
        for extra in reversed(getattr(each, "__metadata__", ())):
            text = extra.description if isinstance(extra, FieldInfo) else extra
            if isinstance(text, str) and text:
                return text
    return ""


def _converted(arguments: list[_Argument], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the function is called with; what is not given and has a default in Python is left to Python."""
    values: dict[str, Any] = {}
    problems = []
    for argument in arguments:
        name, default = argument.name, argument.adapter.get_default_value()
        if name not in given:
            values |= {name: default.value} if default and argument.default is _NOTHING else {}
        elif given[name] is None and argument.default is None:
            values[name] = None
        else:
            try:
                values[name] = argument.adapter.validate_python(given[name])
            except ValidationError as error:
                problems += _problems(name, error)
    required = [argument.name for argument in arguments if argument.is_required]
    return values, problems + _misnamed(given, required, [argument.name for argument in arguments])


def _problems(name: str, error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_context=False, include_input=False)[:3]
    return [f"{'.'.join(map(str, (name, *each['loc'])))}: {each['msg']}" for each in found]


def _misnamed(given: Mapping[str, Any], required: Iterable[str], known: Iterable[str]) -> list[str]:
    unknown = itertools.islice((short(name) for name in given if name not in known), 3)
    near = {name: did_you_mean(name, known) for name in unknown}
    missing = [f"missing argument: {name}" for name in required if name not in given]
    return missing + [f"unknown argument: {name}{hint and '.'}{hint}" for name, hint in near.items()]


# -- schemas, as models read them best


class _QuietSchema(GenerateJsonSchema):
    """A default that JSON cannot hold is not shown, and not warned of."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as pydantic has it


def _parameters_schema(arguments: list[_Argument]) -> dict[str, Any]:
    defs = {name: schema for argument in arguments for name, schema in argument.defs.items()}
    properties = {argument.name: argument.schema for argument in arguments}
    required = [argument.name for argument in arguments if argument.is_required]
    schema = {"type": "object", "properties": properties, "required": required}
    return copy.deepcopy({**schema, "$defs": defs} if defs else schema)


def _flattened(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema with what it refers to put in place, and without titles; and the definitions of what holds itself,
    which alone stays a reference."""
    defs = schema.get("$defs", {})
    reached = {name: _references(each) for name, each in defs.items()}
    for _ in defs:
        reached = {name: each.union(*(reached[other] for other in each)) for name, each in reached.items()}
    inline = {name: each for name, each in defs.items() if name not in reached[name]}
    kept = {name: _flat(each, inline) for name, each in defs.items() if name not in inline}
    return _flat(schema, inline), kept


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = {_referred(node)} - {""}
    return own.union(*map(_references, node.values()))


def _referred(node: Mapping[str, Any]) -> str:
    reference = node.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


_DROPPED = {"title", "discriminator", "$defs"}
_VERBATIM = {"default", "enum", "const", "examples", "required"}
_BY_NAME = {"properties", "patternProperties"}


def _flat(node: Any, inline: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_flat(each, inline) for each in node]
    if not isinstance(node, dict):
        return node
    if _referred(node) in inline:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _flat({**inline[_referred(node)], **beside}, inline)
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if key in _BY_NAME:
            flat[key] = {name: _flat(each, inline) for name, each in value.items()}
        elif key in _VERBATIM:
            flat |= {key: value} if _is_json(value) else {}
        elif key not in _DROPPED:
            flat[key] = _flat(value, inline)
    return flat


def _is_json(value: Any) -> bool:
    """Whether JSON can hold it."""
    try:
        json.dumps(to_jsonable_python(value), allow_nan=False)
    except (ValueError, TypeError):
        return False
    return value is not _NOTHING


# -- docstrings

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params):\s*$|(Returns?|Raises|Yields):|:(param|type|returns?|raises)\b"
)
_ITEM = re.compile(r"(?::param\s(?:[^:]*\s)?|\s+)(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:(.*)")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and what is told of each argument: Google's `Args:`, or `:param name: text`."""
    lines = doc.splitlines()
    end = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines[:end]))
    about = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()
    return about, _read_arguments(lines[end:])


def _read_arguments(lines: list[str]) -> dict[str, str]:
    told: dict[str, list[str]] = {}
    current: list[str] = []
    indent, is_args = 0, False
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip() and not depth:  # another section, or another :param:
            current, indent, is_args = [], 0, line.startswith(("Arg", "Param"))
        indent = indent or depth
        item = _ITEM.match(line)
        if item and (line.startswith(":") or (is_args and depth == indent)):
            current = told.setdefault(item[1], [])
            line = item[2]
        current.append(line)
    return {name: " ".join(" ".join(text).split()) for name, text in told.items()}


# -- tools that are schemas


def _inner(item: dict[str, Any]) -> dict[str, Any]:
    """The form with name, description and parameters."""
    return item["function"] if isinstance(item.get("function"), dict) else item


def _method_for(item: dict[str, Any], owner: Any) -> Callable[..., Any] | None:
    """The method that a schema names."""
    name = _inner(item).get("name")
    method = getattr(owner, name, None) if isinstance(name, str) else None
    return method if callable(method) else None


def _tool_of_schema(item: dict[str, Any], owner: Any) -> _Tool:
    method = _method_for(item, owner)
    if method is None:
        raise _Unusable(
            f"the schema names no method of {type(owner).__name__}, as others do\n"
            "Its name is the name of the method. Where get_tools returns schemas without methods only, the model is"
            " shown them, and the environment reads the calls itself."
        )
    parameters = _inner(item).get("parameters") or {}
    shown = _shown(item)
    _check_method(method, parameters)
    return _Tool(shown.name, shown.schema, method, functools.partial(_checked, parameters))


def _shown(item: dict[str, Any]) -> _Tool:
    """A tool that the model is shown, and that nobody runs."""
    inner = _inner(item)
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        raise _Unusable('the schema has no "name"\nGive it the name that the model is to call.')
    _check_schema(item, inner.get("parameters") or {})
    full = {"type": "function", **(item if inner is not item else {"function": item})}
    return _Tool(name, full, _not_run, functools.partial(_checked, {}))


def _not_run(**_: Any) -> None:
    """Stands for the method of a schema that names none."""


def _check_schema(item: dict[str, Any], parameters: Any) -> None:
    if not _is_json(item):
        raise _Unusable("the schema holds something that JSON cannot hold")
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise _Unusable('its parameters are not {"type": "object", "properties": {"name": {"type": ...}}}')
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) and each in properties for each in required):
        raise _Unusable('"required" of its parameters is not a list of names of its properties')


def _check_method(method: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Refuse a method that a call which fits the schema could not call."""
    required = dict.fromkeys(parameters.get("required", []))
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**required)
        signature.bind(**required, **dict.fromkeys(parameters.get("properties", {}).keys() - required))
    except TypeError as error:
        raise _Unusable(f"the schema does not fit the method: {error}\nMake their arguments the same.") from None


def _checked(parameters: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments as they are; a schema says too little about Python to convert them."""
    properties = parameters.get("properties", {})
    wrong = {name: _misfit(value, properties.get(name, {})) for name, value in given.items()}
    problems = [f"{name}: {problem}" for name, problem in wrong.items() if problem]
    known = {**properties, **given} if parameters.get("additionalProperties") else properties
    return given, problems + _misnamed(given, parameters.get("required", []), known)


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


def _misfit(value: Any, schema: dict[str, Any]) -> str:
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if value is None and schema.get("nullable"):
        return ""
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return f"should be of type {' or '.join(map(str, kinds))}"
    options = schema.get("enum")
    is_option = not isinstance(options, list) or value in options
    return "" if is_option else f"should be one of {json.dumps(options, ensure_ascii=False)}"


def _is_kind(value: Any, kind: Any) -> bool:
    """A kind that JSON does not have fits everything; True is no number."""
    types_of = _KINDS.get(str(kind))
    return types_of is None or (isinstance(value, types_of) and (kind == "boolean" or not isinstance(value, bool)))
