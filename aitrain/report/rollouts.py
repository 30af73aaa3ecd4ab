"""The rollout files of a run, of any size: an index of all episodes, and each one read where it lies.

Files are read as they are: a last line that is still being written waits for the next look, a line that is no record is
counted as damaged, and bytes that are no UTF-8 are shown as replacement characters.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 64 * 2**20
"""Bytes; a longer line is no record of ours, and is skipped without being held."""
EXCERPT = 160
"""Characters that stand for a prompt or an answer in a list."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """An episode as the index knows it: where it lies, and what one filters and counts by."""

    file: int
    offset: int
    length: int
    step: int
    policy_step: int
    """Which step the weights are of."""
    when: str
    """Which scoring of the held-out cases, such as `before_sampled`; empty for training."""
    group: int
    case: str
    """The number of the case's row; in records without one, what the environment knows the case by."""
    case_idx: str
    """What the environment knows the case by, which several rows may have in common."""
    score: float | None
    advantage: float | None
    stop: str
    failure: str
    """The kind of failure, empty without one."""
    turns: int
    tokens: int

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to a scoring of the held-out cases."""
        return bool(self.when)


@dataclass
class _File:
    path: Path
    identity: tuple[int, int]
    """Device and inode: a file that was written anew is another one."""
    done: int = 0
    """Bytes that were read; the rest is new, or a line that is not whole yet."""


@dataclass
class Rollouts:
    """All episodes below a folder of rollout files, or in one such file; `refresh` reads what is new."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    prompts: dict[tuple[bool, str], str] = field(default_factory=dict)
    """The beginning of each case's prompt, by (is it held out, case)."""
    damaged: int = 0
    """Lines that are no records."""
    files: list[_File] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Read what was written since the last time; all of it again where a file was written anew."""
        with self._lock:
            found = {path: path.stat() for path in self._paths()}
            if any(_is_another(file, found.get(file.path)) for file in self.files):
                self.entries, self.prompts, self.damaged, self.files = [], {}, 0, []
            known = {file.path for file in self.files}
            for path, stat in found.items():
                if path not in known:
                    self.files.append(_File(path, (stat.st_dev, stat.st_ino)))
            for number, file in enumerate(self.files):
                self._read_on(number, file)

    def _paths(self) -> list[Path]:
        """Plain files only: a link could lead anywhere."""
        candidates = [self.path] if self.path.is_file() else sorted(self.path.glob("*.jsonl"))
        return [path for path in candidates if path.is_file() and not path.is_symlink()]

    def _read_on(self, number: int, file: _File) -> None:
        with file.path.open("rb") as stream:
            stream.seek(file.done)
            for line, start, end in whole_lines(stream):
                file.done = end
                record = parse(line)
                if record is not None:
                    self._add(entry_of(record, (number, start, end - start)), record)
                elif line.strip() or end - start >= LONGEST_LINE:
                    self.damaged += 1

    def _add(self, entry: Entry, record: Record) -> None:
        self.entries.append(entry)
        key = (entry.is_held_out, entry.case)
        if key not in self.prompts:
            self.prompts[key] = prompt_excerpt(record)

    def record(self, entry: Entry) -> Record:
        """The whole record, read from its file; empty when the file is not what it was."""
        return parse(self.raw(entry)) or {}

    def raw(self, entry: Entry) -> bytes:
        """The record's bytes."""
        with self.files[entry.file].path.open("rb") as stream:
            stream.seek(entry.offset)
            return stream.read(entry.length)

    def each_raw(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes]]:
        """The bytes of many records, each file opened once."""
        streams: dict[int, BinaryIO] = {}
        try:
            for entry in entries:
                if entry.file not in streams:
                    streams[entry.file] = self.files[entry.file].path.open("rb", buffering=0)
                yield entry, os.pread(streams[entry.file].fileno(), entry.length, entry.offset)
        finally:
            for stream in streams.values():
                stream.close()


def _is_another(file: _File, stat: os.stat_result | None) -> bool:
    return stat is None or (stat.st_dev, stat.st_ino) != file.identity or stat.st_size < file.done


def whole_lines(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(line, where it starts, where the next one does) for each line that ends; too long a one comes empty."""
    start = stream.tell()
    while line := stream.readline(LONGEST_LINE):
        end = start + len(line)
        if not line.endswith(b"\n"):
            if len(line) < LONGEST_LINE:
                return
            line, end = b"", end + _skip_line(stream)
        yield line, start, end
        start = end


def _skip_line(stream: BinaryIO) -> int:
    """To the end of the line; returns how many bytes that were."""
    skipped = 0
    while piece := stream.readline(2**20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def parse(line: bytes) -> Record | None:
    """The JSON object on a line, None when there is none."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace"), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def entry_of(record: Record, place: tuple[int, int, int]) -> Entry:
    """The index's view of a record; what is missing or of a wrong type is 0, empty or None."""
    error, case_idx, step = record.get("error"), record.get("case_idx"), _whole(record.get("step"))
    failure = str(error.get("kind") or "raised") if isinstance(error, dict) else ("raised" if error else "")
    return Entry(
        *place,
        step=step,
        policy_step=_whole(record.get("policy_step", step)),
        when=_word(record.get("when")),
        group=_whole(record.get("group")),
        case=_word(record.get("row", case_idx)),
        case_idx=_word(case_idx),
        score=finite(record.get("score")),
        advantage=finite(record.get("advantage")),
        stop=_word(record.get("stop")),
        failure=sys.intern(failure[:100]),
        turns=_whole(record.get("turns")),
        tokens=_whole(record.get("tokens")),
    )


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int:
    return int(finite(value) or 0)


def _word(value: Any) -> str:
    """Interned, because a few words are those of a million episodes."""
    return "" if value is None else sys.intern(str(value)[:200])


# -- what an episode says


@dataclass(frozen=True)
class Message:
    """One message as a page shows it: `calls` are (tool, arguments) pairs."""

    role: str
    text: str
    name: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def messages_of(record: Record) -> tuple[list[Message], list[Message]]:
    """What was asked, and all that followed."""
    prompt, said = record.get("prompt"), record.get("messages")
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not isinstance(said, list):
        said = [*asked, {"role": "assistant", "content": record.get("completion")}]
    shown = [_message(raw) for raw in said]
    return shown[: len(asked)], shown[len(asked) :]


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        return Message("", text_of(raw))
    calls = raw.get("tool_calls")
    pairs = tuple(_call(call) for call in calls) if isinstance(calls, list) else ()
    return Message(str(raw.get("role") or ""), text_of(raw.get("content")), str(raw.get("name") or ""), pairs)


def _call(raw: Any) -> tuple[str, str]:
    function = raw.get("function", raw) if isinstance(raw, dict) else raw
    if not isinstance(function, dict):
        return "", text_of(function)
    return str(function.get("name") or ""), text_of(function.get("arguments"))


def text_of(content: Any) -> str:
    """A message's content as text; parts of other kinds as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return json.dumps(content, ensure_ascii=False)


def prompt_excerpt(record: Record) -> str:
    """The beginning of what was asked: of the last message of the prompt, as the first is often the system's."""
    prompt = record.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return excerpt(text_of(last.get("content") if isinstance(last, dict) else last))


def answer_excerpt(record: Record) -> str:
    """The beginning of what the model said last."""
    return excerpt(text_of(record.get("completion")))


def excerpt(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text[: 4 * EXCERPT].split())
    return line[:EXCERPT] + ("…" if len(line) > EXCERPT or len(text) > 4 * EXCERPT else "")
