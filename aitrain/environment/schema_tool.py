"""Tools that are given as JSON schemas, which name methods of the environment or are only shown to the model."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable

from aitrain.environment.tool_call_parser import ToolJson
from aitrain.environment.tool_schema import InvalidToolError, Tool, is_json, name_problems


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
