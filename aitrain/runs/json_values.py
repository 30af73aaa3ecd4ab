"""Typed values from JSON files that may be damaged: what is missing or of a wrong type gets a default.

A folder may be somebody else's: a pipe or a device in it would be read forever, so only regular files are read, and not
more of them than fits.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

JsonObject = dict[str, object]
LARGEST_FILE = 64 * 2**20
"""Maximum bytes of a file that is read at once."""
LONGEST_LINE = 2**28
"""Maximum bytes of a line; reading a file stops at a longer one."""


def regular(path: str, flags: int) -> int:
    """An `opener` for files that are read; anything but a regular file, or a link to one, is as if it was missing."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise FileNotFoundError(errno.ENOENT, "not a regular file", path)


def read_whole(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is larger than LARGEST_FILE.
    """
    with open(path, "rb", opener=regular) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def whole_lines(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(line, its offset, the offset of the next one) for each complete line, up to one that is endless."""
    start = stream.tell()
    while (line := stream.readline(LONGEST_LINE)).endswith(b"\n"):
        end = start + len(line)
        yield line, start, end
        start = end


def parse_object(text: bytes) -> JsonObject | None:
    """The JSON object of a text, None if it is none, or has numbers that are not finite."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def as_object(value: object) -> JsonObject:
    """A JSON object, empty for anything else."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[JsonObject]:
    """A list of JSON objects, empty for anything else, as is an item that is none."""
    return list(map(as_object, value)) if isinstance(value, list) else []


def as_float(value: object) -> float | None:
    """A finite number, None for anything else."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max else None


def as_text(value: object) -> str:
    """Text as it is, a list of text parts as their lines, nothing for null, and JSON for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return json.dumps(value, ensure_ascii=False)
