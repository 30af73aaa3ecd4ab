"""Parses the tool calls in a completion."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ToolJson = dict[str, Any]
"""A JSON object of a tool: its schema, or the arguments of a call."""

MAX_CALLS = 64
"""Maximum number of calls parsed from one answer, as a model may repeat itself."""

MAX_DEPTH = 100
"""Maximum nesting of arguments; libraries that serialize them fail a little beyond it."""

TOO_DEEP = f"it nests deeper than {MAX_DEPTH} levels"


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
_SPACE = re.compile(r"\s*")


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The answer without its `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, and the calls in order.

    If there are more than MAX_CALLS, the last of MAX_CALLS + 1 has a problem that says so.
    """
    text = clean(text)
    calls = itertools.chain.from_iterable(map(_calls_in, _BLOCK.finditer(text)))
    found = list(itertools.islice(calls, MAX_CALLS + 1))
    if len(found) > MAX_CALLS:
        found[MAX_CALLS] = ToolCall("", None, f"more than {MAX_CALLS} calls in one answer: the others were not run")
    return _BLOCK.sub("", text).strip(), found


def _calls_in(block: re.Match[str]) -> Iterator[ToolCall]:
    """The calls of one block, usually one; some models write one JSON object per line in a block."""
    written, position = block[1].strip(), 0
    if not block[2]:
        yield ToolCall("", None, "the call has no closing </tool_call>")
        return
    while position < len(written) or not written:
        try:
            value, position = _decoded(written, position)
        except ValueError as error:
            yield ToolCall("", None, f"the call is not valid JSON: {error}")
            return
        yield _call(value)
        position += len(_SPACE.match(written, position)[0])  # type: ignore[index]  # it matches the empty string too


def _call(value: object) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", None, 'the call is not a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", None, 'the call has no "name", or one that is not a string')
    try:
        arguments = _arguments(value.get("arguments", value.get("parameters")))
    except ValueError as error:
        return ToolCall(name.strip(), None, f"{short(name)}: {error}")
    return ToolCall(name.strip(), arguments)


def _arguments(written: object) -> ToolJson:
    """Arguments of a call; some models write the object as a JSON string, or omit it for a tool without parameters."""
    value = written
    if isinstance(written, str):
        try:
            value, end = _decoded(written.strip())
        except ValueError as error:
            raise ValueError(f"the arguments are not valid JSON: {error}") from None
        value = value if end == len(written.strip()) else None
    elif written is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a JSON object")
    return value


def _decoded(text: str, start: int = 0) -> tuple[object, int]:
    """One JSON value of the text and its end; a ValueError has the reason why it cannot be used."""
    try:
        value, end = _JSON.raw_decode(text, start)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_deep(value):
        raise ValueError(TOO_DEEP)
    if "\\u" in text[start:end]:  # an escape may be half a character
        value = json.loads(clean(json.dumps(value, ensure_ascii=False)))
    return value, end


def is_deep(value: object) -> bool:
    """Whether lists and objects nest deeper than MAX_DEPTH."""
    layer = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = (one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, (dict, list)))
        layer = list(itertools.chain.from_iterable(nested))
    return bool(layer)


def _number(kind: Callable[[str], int | float], digits: str) -> int | float:
    """Refuse numbers beyond the range of a float: 1e999 would become infinity, which JSON does not have."""
    if not math.isfinite(float(digits)):
        raise ValueError(f"{digits[:20]}... is too large a number")
    return kind(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value of JSON")


def _once(pairs: list[tuple[str, object]]) -> ToolJson:
    """A dict of the pairs; refuses a name that occurs twice, of which Python silently keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{short(name)} is given twice")
    return found


_JSON = json.JSONDecoder(
    object_pairs_hook=_once,
    parse_int=functools.partial(_number, int),
    parse_float=functools.partial(_number, float),
    parse_constant=_no_constant,
)


def clean(text: str) -> str:
    """Replace lone surrogates, which no file, tokenizer or terminal accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def short(text: str, length: int = 60) -> str:
    """The text on one line, cut to `length` characters."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
