"""A tool of an environment, and what all kinds of tools share: JSON schemas, and errors about names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from aitrain.environment.tool_call_parser import ToolJson, short
from aitrain.errors import AitrainError, did_you_mean


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
