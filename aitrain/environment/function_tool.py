"""Tools that are functions: a pydantic model of their arguments, made from hints, defaults and docstring."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from aitrain.environment.tool_call_parser import ToolJson, short
from aitrain.environment.tool_schema import InvalidToolError, Tool, flatten, name_problems

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
