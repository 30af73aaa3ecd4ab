"""Parses a completion: the thought before its answer, between the tags of the chat template, and its tool calls."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

THOUGHT_KEYS = ("reasoning_content", "thinking")
"""Names under which messages have a thought apart from their content; ours is the first."""


@dataclass(frozen=True)
class ThoughtTags:
    """What begins and what ends a thought, and the text that is appended to one that must end."""

    begin: str
    end: str
    ending: str
    header: str = ""
    """What an answer may begin with that is not part of it."""

    def split(self, text: str, is_open: bool = False) -> tuple[str, str | None]:
        """The thought that a text begins with, and the answer, None if the thought does not end. `is_open`: the text
        continues a thought."""
        said = text.lstrip()
        if not is_open and not said.startswith(self.begin):
            return "", text
        thought, end, answer = said.removeprefix(self.begin).partition(self.end)
        return thought.strip(), answer.lstrip() if end else None


THINK = ThoughtTags("<think>", "</think>", "\n</think>\n\n")
_NEXT, _FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
KNOWN_TAGS = (
    THINK,  # Qwen3, SmolLM3, DeepSeek-R1, GLM, Nemotron, LFM2.5
    # GPT-OSS: after a thought, or in its place, an answer or a call
    ThoughtTags("<|channel|>analysis<|message|>", _NEXT, _NEXT + _FINAL, _FINAL),
    ThoughtTags("<|channel>thought", "<channel|>", "\n<channel|>"),  # Gemma 4
)


def thought_of(message: Mapping[str, Any]) -> str:
    """The thought of a message, empty without one."""
    return next((str(message[key]) for key in THOUGHT_KEYS if message.get(key)), "")


def without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its thought."""
    return {name: value for name, value in message.items() if name not in THOUGHT_KEYS}


# -- tool calls

ToolJson = dict[str, Any]
"""A JSON object of a tool: its schema, or the arguments of a call."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `problem` is an error message for the model if it is malformed."""

    name: str
    arguments: ToolJson | None = None
    problem: str = ""

    def as_message_part(self) -> ToolJson:
        """The call as an entry of the assistant message's `tool_calls`; arguments that could not be read are {}."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments or {}}}


_BLOCK = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|(?=<tool_call>)|\Z)", re.DOTALL)


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The answer without its `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, and the calls in order.
    An answer without calls is unchanged: it is recorded as the environment gets it.
    """
    text = clean(text)
    found = list(map(_call_in, _BLOCK.finditer(text)))
    return _BLOCK.sub("", text).strip() if found else text, found


def _call_in(block: re.Match[str]) -> ToolCall:
    if not block[2]:
        return ToolCall("", None, "the call has no closing </tool_call>")
    try:
        return parse_call(strict_json(block[1]))
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"the call is not valid JSON: {error}")


def parse_call(value: object) -> ToolCall:
    """The call that a JSON value is, in an answer or from a server; its arguments may be JSON text."""
    if not isinstance(value, dict):
        return ToolCall("", None, 'the call is not a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", None, 'the call has no "name", or one that is not a string')
    name, problem = name.strip(), "are not a JSON object"
    arguments = value.get("arguments", value.get("parameters"))
    arguments = {} if arguments in (None, "") else arguments  # of a tool without parameters
    try:  # some models write the object as a JSON string; parsers of others read NaN, which is no JSON
        arguments = strict_json(arguments if isinstance(arguments, str) else json.dumps(arguments))
        if isinstance(arguments, dict):
            return ToolCall(name, arguments)
    except (ValueError, RecursionError) as error:
        problem = f"are not valid JSON: {error}"
    return ToolCall(name, None, f"{short(name)}: the arguments {problem}")


def strict_json(text: str) -> object:
    """The JSON value of a text, which can be written as JSON again.

    Raises:
        ValueError: it is no JSON, has a number that a float cannot hold, or nests deeper than 200 levels.
    """
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    return value


def clean(text: str) -> str:
    """Replace lone surrogates, which no file, tokenizer or terminal accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def short(text: str, length: int = 60) -> str:
    """The text on one line, cut to `length` characters."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length and len(text) <= 4 * length else f"{line[: length - 3]}..."
