"""Checks of tools: described, and robust against wrong calls."""

from __future__ import annotations

import json
from collections.abc import Iterator

from aitrain.environment.tool_call_parser import ToolJson
from aitrain.environment.tools import function_part
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.player import JUNK, Script, is_of_service

EXAMPLES: dict[str, object] = {
    "string": "x",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def tools(subject: Subject) -> Iterator[EnvFinding]:
    """Tools are described, and answer calls that make no sense with a message."""
    case = subject.sample[0]
    opened = subject.play_one(case, JUNK).conversation.reset
    functions = [function_part(schema) for schema in opened.tools]
    yield from _undescribed(functions)
    if not opened.runs_tools:
        return
    for function in functions:
        name = str(function.get("name"))
        for arguments in ({}, _example(function)):
            call = json.dumps({"name": name, "arguments": arguments})
            episode = subject.play_one(case, Script((f"<tool_call>{call}</tool_call>",)), again=True)
            if is_of_service(episode.failure):
                subject.episodes.append(episode)  # the check `exceptions` reports it
            elif episode.failure is not None and episode.failure.place == f"the tool {name}":
                yield EnvFinding(
                    "tools",
                    "fail",
                    f"The tool {name} {episode.failure.message} for the arguments {json.dumps(arguments)}.",
                    "A policy that tries the tool loses the whole episode, and learns nothing from its mistake.",
                    "Return a message that says what is wrong with the arguments.",
                    case.case_idx,
                )
                break


def _undescribed(functions: list[ToolJson]) -> Iterator[EnvFinding]:
    silent = [str(function.get("name")) for function in functions if not function.get("description")]
    if silent:
        yield EnvFinding(
            "tools",
            "warning",
            f"{len(silent)} of {len(functions)} tools have no description: {', '.join(silent[:5])}.",
            "The model sees only a name, and has to guess what the tool does.",
            "Write a docstring for each tool.",
        )


def _example(function: ToolJson) -> dict[str, object]:
    """Arguments of the right types for a tool, without meaning."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {name: _value(properties[name]) for name in properties if name in parameters.get("required", properties)}


def _value(schema: ToolJson) -> object:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type") or next((one.get("type") for one in schema.get("anyOf", [])), "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else str(kind), "x")
