"""Typed values from JSON files that may be damaged: what is missing or of a wrong type gets a default."""

from __future__ import annotations

import json
import math
from typing import TypeAlias

JsonObject: TypeAlias = dict[str, object]


def parse_object(line: bytes) -> JsonObject | None:
    """The JSON object on a line, None if there is none; invalid UTF-8 becomes replacement characters."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace"), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_object(value: object) -> JsonObject:
    """A JSON object, empty for anything else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[JsonObject]:
    """A list of JSON objects; any other item becomes a message with that content."""
    if not isinstance(value, list):
        return []
    return [item if isinstance(item, dict) else {"content": item} for item in value]


def as_float(value: object) -> float | None:
    """A finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_int(value: object) -> int | None:
    """A whole number, None for anything else."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    number = as_float(value)
    return None if number is None else int(number)


def as_text(value: object) -> str:
    """Text as it is, a list of text parts as their lines, nothing for null, and JSON for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return json.dumps(value, ensure_ascii=False)
