"""The tools of an environment: shown to the model as JSON schemas, called by it as text, and run with Python values.

The result of a wrong call is an error message for the model; an exception in a tool is a failure of the environment.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from aitrain.environment.contract import ToolResult
from aitrain.environment.tool_call_parser import TOO_DEEP, ToolCall, ToolJson, clean, is_deep, short
from aitrain.errors import AitrainError, EnvironmentFailed, did_you_mean
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.user_code import failure_message


@dataclass(frozen=True)
class Tool:
    """One tool. `read` turns the model's arguments into keyword arguments for `run` and a list of problems."""

    name: str
    schema: ToolJson
    run: Callable[..., object]
    read: Callable[[ToolJson], tuple[ToolJson, list[str]]]


class InvalidToolError(AitrainError):
    """Something that get_tools returned cannot be a tool; the message says why, and what to do."""


def name_problems(given: Collection[str], required: Iterable[str], known: Collection[str]) -> list[str]:
    """Messages about missing arguments, and about at most three unknown ones."""
    missing = [f"missing argument: {name}" for name in required if name not in given]
    unknown = itertools.islice((short(name) for name in given if name not in known), 3)
    near = {name: did_you_mean(name, known) for name in unknown}
    return missing + [f"unknown argument: {name}{hint and '.'}{hint}" for name, hint in near.items()]


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON."""
    try:
        json.dumps(to_jsonable_python(value), allow_nan=False)
    except (ValueError, TypeError):
        return False
    return True


# -- schemas as models read them best

_DROPPED = {"title", "discriminator", "$defs"}
_VERBATIM = {"default", "enum", "const", "examples", "required"}
_BY_NAME = {"properties", "patternProperties"}


def flatten(schema: ToolJson) -> ToolJson:
    """The schema without titles, and with each `$ref` replaced by its definition; only recursive definitions remain
    references to `$defs`."""
    defs = schema.get("$defs", {})
    reached = {name: _references(each) for name, each in defs.items()}
    for _ in defs:
        reached = {name: each.union(*(reached[other] for other in each)) for name, each in reached.items()}
    inline = {name: each for name, each in defs.items() if name not in reached[name]}
    kept = {name: _flat(each, inline) for name, each in defs.items() if name not in inline}
    flat: ToolJson = _flat(schema, inline)
    return {**flat, "$defs": kept} if kept else flat


def _references(node: object) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = {_referred(node)} - {""}
    return own.union(*map(_references, node.values()))


def _referred(node: Mapping[str, object]) -> str:
    reference = node.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def _flat(node: Any, inline: Mapping[str, ToolJson]) -> Any:
    if isinstance(node, list):
        return [_flat(each, inline) for each in node]
    if not isinstance(node, dict):
        return node
    if _referred(node) in inline:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _flat({**inline[_referred(node)], **beside}, inline)
    flat: ToolJson = {}
    for key, value in node.items():
        if key in _BY_NAME:
            flat[key] = {name: _flat(each, inline) for name, each in value.items()}
        elif key in _VERBATIM:
            flat |= {key: value} if is_json(value) else {}
        elif key not in _DROPPED:
            flat[key] = _flat(value, inline)
    return flat


_Function = Callable[..., object]
_NO_DEFAULT = inspect.Parameter.empty


def tool_of_function(function: _Function) -> Tool:
    """The tool that calls a function or method.

    Raises:
        InvalidToolError: a model could not call it by name, or JSON cannot describe its arguments.
    """
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidToolError("it has no name to call it by\nWrite it as a method or a function, with def.")
    source = function.__func__ if inspect.ismethod(function) else function
    describe = describe_function if inspect.isfunction(source) else describe_function.__wrapped__
    known = describe(source, inspect.ismethod(function))
    schema = {"name": name, "description": known.description, "parameters": copy.deepcopy(known.parameters)}
    return Tool(name, {"type": "function", "function": schema}, function, known.read)


@dataclass(frozen=True)
class FunctionSpec:
    """Description of a function, JSON schema of its parameters, and the pydantic model of its arguments."""

    description: str
    parameters: ToolJson
    defaults: dict[str, object]
    """Python's default of each parameter, or `inspect.Parameter.empty`."""
    model: type[BaseModel]
    """Fields in the order of the parameters, named by number, as a parameter's name may be an attribute of BaseModel;
    their aliases are the parameters' names."""

    def read(self, given: ToolJson) -> tuple[ToolJson, list[str]]:
        """Keyword arguments for the function, and the problems of the arguments that the model gave.

        An argument that is missing gets Python's default; so does null if that default is None, for every hint.
        """
        problems = name_problems(given, self.parameters["required"], self.defaults)
        null = {name for name, value in given.items() if value is None and self.defaults.get(name, "") is None}
        try:
            read = self.model.model_validate({name: value for name, value in given.items() if name not in null})
        except ValidationError as error:
            return {}, [*_problems(error), *problems]
        values = zip(self.defaults.items(), vars(read).items(), strict=True)
        is_given = read.model_fields_set
        return {
            name: value for (name, default), (field, value) in values if default is _NO_DEFAULT or field in is_given
        }, problems


def _problems(error: ValidationError) -> Iterator[str]:
    """At most three problems for each argument; missing arguments are reported by name_problems."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    reported = (each for each in wrong if each["type"] != "missing" or len(each["loc"]) > 1)
    for _, problems in itertools.groupby(reported, key=lambda each: each["loc"][0]):
        for each in itertools.islice(problems, 3):
            yield f"{'.'.join(map(str, each['loc']))}: {each['msg']}"


@functools.lru_cache(maxsize=256)  # the objects of different episodes have the same methods
def describe_function(source: _Function, is_bound: bool) -> FunctionSpec:
    """Read a function's signature, hints and docstring; `is_bound`: its first parameter is `self`."""
    parameters = _parameters(source, is_bound)
    hints = _hints(source, parameters)
    description, texts = _read_docstring(inspect.getdoc(_callee(source)) or "")
    model, schema = _model(parameters, hints)
    for name, each in schema.get("properties", {}).items():
        default = {"default": each.pop("default")} if "default" in each else {}
        text = _text_of_hint(hints.get(name)) or texts.get(name, "")
        each |= ({"description": text} if text else {}) | default
    shown = {"type": "object", "properties": {}, "required": [], **schema}
    shown.pop("description", None)
    defaults = {each.name: _NO_DEFAULT if isinstance(each.default, FieldInfo) else each.default for each in parameters}
    return FunctionSpec(description, shown, defaults, model)


class _QuietSchema(GenerateJsonSchema):
    """Leaves out defaults that JSON cannot hold, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as pydantic has it


def _model(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> tuple[type[BaseModel], ToolJson]:
    """The model of the arguments, and its JSON schema.

    Raises:
        InvalidToolError: a hint is of a type that pydantic or JSON does not know.
    """
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        name, default, hint = parameter.name, parameter.default, hints.get(parameter.name, Any)
        has_none = default is _NO_DEFAULT or isinstance(default, FieldInfo)
        field = Annotated[hint, Field(alias=name)] if has_none else (hint, Field(default, alias=name))
        fields[f"argument_{number}"] = field
    try:
        model: type[BaseModel] = create_model("Arguments", __config__=ConfigDict(allow_inf_nan=False), **fields)
        return model, flatten(model.model_json_schema(schema_generator=_QuietSchema))
    except Exception as error:
        for parameter in parameters if len(parameters) > 1 else ():
            _model([parameter], hints)  # raises for the one to name
        why = short(re.split(r"\n|\. ", str(error))[0], 200)
        what = "Hint it with int, str, list[...], Literal[...], a dataclass or a pydantic model."
        raise InvalidToolError(f"its argument {parameters[0].name} cannot be described: {why}\n{what}") from None


def _text_of_hint(hint: object) -> str:
    """The text of `Annotated[int, "text"]`, of a pydantic `Field(description="text")`, or of either `| None`."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    for each in (hint, *members):
        for extra in reversed(getattr(each, "__metadata__", ())):
            text = extra.description if isinstance(extra, FieldInfo) else extra
            if isinstance(text, str) and text:
                return text
    return ""


# -- signatures


def _callee(source: _Function) -> _Function:
    """The function under partials and callable objects, which has the hints and the docstring."""
    if isinstance(source, functools.partial):
        return _callee(source.func)
    is_function = inspect.isroutine(source) or hasattr(source, "__wrapped__")
    return source if is_function else type(source).__call__


_NOT_NAMED = {
    inspect.Parameter.POSITIONAL_ONLY: "it takes {} by position only\nRemove the `/`: a model gives arguments by name.",
    inspect.Parameter.VAR_POSITIONAL: "it takes *{}\nGive each argument a name, or make it one list.",
    inspect.Parameter.VAR_KEYWORD: "it takes **{}\nGive each argument a name, or make it one dict.",
}


def _parameters(source: _Function, is_bound: bool) -> list[inspect.Parameter]:
    """Parameters that a call may give: without `self`, and without those that a functools.partial has bound."""
    is_partial = isinstance(source, functools.partial)
    try:
        found = list(inspect.signature(source, follow_wrapped=not is_partial).parameters.values())
    except (TypeError, ValueError):
        raise InvalidToolError("Python knows no signature of it\nCall it from a function of your own.") from None
    given = source.keywords if isinstance(source, functools.partial) else {}
    has_self = is_bound and found and found[0].kind is not inspect.Parameter.VAR_POSITIONAL
    found = [parameter for parameter in found[bool(has_self) :] if parameter.name not in given]
    for parameter in found:
        if parameter.kind in _NOT_NAMED:
            raise InvalidToolError(_NOT_NAMED[parameter.kind].format(parameter.name))
    return found


def _hints(source: _Function, parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Hints of the parameters, with a default that is a pydantic Field as part of its hint.

    The return hint is not evaluated, as it may name what is not imported.
    """
    callee, defaults = _callee(source), {parameter.name: parameter.default for parameter in parameters}

    def carrier() -> None: ...

    known = getattr(callee, "__annotations__", {})
    carrier.__annotations__ = {name: hint for name, hint in known.items() if name in defaults}
    try:
        place = getattr(inspect.unwrap(callee), "__globals__", {})
        hints = get_type_hints(carrier, globalns=place, include_extras=True)
    except Exception as error:
        why = short(f"{type(error).__name__}: {error}", 200)
        what = "Define or import what the hints name at the top of the module."
        raise InvalidToolError(f"the hints of its arguments cannot be read: {why}\n{what}") from None
    fields = {name: default for name, default in defaults.items() if isinstance(default, FieldInfo)}
    return hints | {name: Annotated[hints.get(name, Any), default] for name, default in fields.items()}


# -- docstrings

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params):\s*$|(Returns?|Raises|Yields):|:(param|type|returns?|raises)\b"
)
_ITEM = re.compile(r"(?::param\s(?:[^:]*\s)?|\s+)(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:(.*)")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each argument, from Google's `Args:` or `:param name: text`."""
    lines = doc.splitlines()
    end = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines[:end]))
    about = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()
    return about, _read_arguments(lines[end:])


def _read_arguments(lines: list[str]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    indent, is_args = 0, False
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip() and not depth:  # another section, or another :param:
            current, indent, is_args = [], 0, line.startswith(("Arg", "Param"))
        indent = indent or depth
        item = _ITEM.match(line)
        if item and (line.startswith(":") or (is_args and depth == indent)):
            current = texts.setdefault(item[1], [])
            line = item[2]
        current.append(line)
    return {name: " ".join(" ".join(text).split()) for name, text in texts.items()}


def method_for(item: ToolJson, owner: object) -> Callable[..., object] | None:
    """The method that a schema names."""
    name = function_part(item).get("name")
    method = getattr(owner, name, None) if isinstance(name, str) else None
    return method if callable(method) else None


def function_part(item: ToolJson) -> ToolJson:
    """The part of a schema that has name, description and parameters."""
    inner = item.get("function")
    return inner if isinstance(inner, dict) else item


def tool_of_schema(item: ToolJson, owner: object) -> Tool:
    """The tool that calls the method named by a schema.

    Raises:
        InvalidToolError: there is no such method, or a call that fits the schema does not fit the method.
    """
    method = method_for(item, owner)
    if method is None:
        raise InvalidToolError(
            f"the schema names no method of {type(owner).__name__}, but other schemas do\n"
            "Use the method's name as the schema's name. If no schema names a method, the model is shown them all, and"
            " the environment parses the calls itself."
        )
    parameters = function_part(item).get("parameters") or {}
    shown = shown_tool(item)
    _check_method(method, parameters)
    return Tool(shown.name, shown.schema, method, functools.partial(_checked, parameters))


def shown_tool(item: ToolJson) -> Tool:
    """A tool that is shown to the model and not run: the environment parses its calls.

    Raises:
        InvalidToolError: it is no schema of a function.
    """
    inner = function_part(item)
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidToolError('the schema has no "name"\nGive it the name that the model is to call.')
    _check_schema(item, inner.get("parameters") or {})
    full = {"type": "function", **(item if inner is not item else {"function": item})}
    return Tool(name, full, lambda **_: None, functools.partial(_checked, {}))


def _check_schema(item: ToolJson, parameters: object) -> None:
    if not is_json(item):
        raise InvalidToolError("the schema holds something that JSON cannot hold")
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise InvalidToolError('its parameters are not {"type": "object", "properties": {"name": {"type": ...}}}')
    required = parameters.get("required", []) if isinstance(parameters, dict) else []
    if not isinstance(required, list) or not all(isinstance(each, str) and each in properties for each in required):
        raise InvalidToolError('"required" of its parameters is not a list of names of its properties')


def _check_method(method: Callable[..., object], parameters: ToolJson) -> None:
    """Refuse a method whose signature does not accept every call that fits the schema."""
    required = dict.fromkeys(parameters.get("required", []))
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**required)
        signature.bind(**required, **dict.fromkeys(parameters.get("properties", {}).keys() - required))
    except TypeError as error:
        raise InvalidToolError(f"the schema does not fit the method: {error}\nMake their arguments the same.") from None


def _checked(parameters: ToolJson, given: ToolJson) -> tuple[ToolJson, list[str]]:
    """The arguments, unconverted, and their problems."""
    properties = parameters.get("properties", {})
    wrong = {name: _misfit(value, properties.get(name, {})) for name, value in given.items()}
    problems = [f"{name}: {problem}" for name, problem in wrong.items() if problem]
    known = {**properties, **given} if parameters.get("additionalProperties") else properties
    return given, problems + name_problems(given, parameters.get("required", []), known)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


def _misfit(value: object, schema: ToolJson) -> str:
    names = schema.get("type", [])
    names = names if isinstance(names, list) else [names]
    if value is None and schema.get("nullable"):
        return ""
    if names and not any(_is_of_type(value, str(name)) for name in names):
        return f"should be of type {' or '.join(map(str, names))}"
    options = schema.get("enum")
    is_option = not isinstance(options, list) or value in options
    return "" if is_option else f"should be one of {json.dumps(options, ensure_ascii=False)}"


def _is_of_type(value: object, name: str) -> bool:
    """Whether a value has a JSON type; True and False are not numbers, and an unknown type fits everything."""
    types_of = _TYPES.get(name)
    return types_of is None or (isinstance(value, types_of) and (name == "boolean" or not isinstance(value, bool)))


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
