"""An index of the rollout files of a run, of any size: what a page filters by, and where each record is.

An incomplete last line is read by the next refresh, and a line that is no record is counted as damaged.
"""

import os
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path

from aitrain.environment.completion_parser import short
from aitrain.runs.json_values import as_text, regular, whole_lines
from aitrain.runs.records import RECORD, EpisodeFacts, RolloutRecord, prompt_key

EXCERPT = 160
"""Characters of a prompt or an answer in a list."""

LENIENT = "lenient"
"""The metric that is the score without the answer's format."""

FACTS = [field.name for field in fields(EpisodeFacts)]
GroupKey = tuple[int, str, int | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry(EpisodeFacts):
    """An episode in the index: its place in the files, and the values for filters and counts."""

    number: int
    """Its place in the index."""
    file: Path
    offset: int
    length: int
    case: str
    """The case's row number; in records without one, its `case_idx`."""
    case_idx: str
    """The environment's name for the case, not necessarily unique."""
    lenient: float | None
    """The score without the answer's format, where the environment says it."""
    failure: str
    """The kind of failure, empty without one."""
    turns: int

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to a scoring of the held-out cases."""
        return bool(self.eval_phase)

    @property
    def group_key(self) -> GroupKey:
        """Key of its group; for held-out cases, the samples of one case in one scoring are a group."""
        return self.step, self.eval_phase, self.group, self.case if self.eval_phase else ""


@dataclass
class RolloutIndex:
    """All episodes in a folder of rollout files; `refresh` reads what is new."""

    path: Path
    entries: list[IndexEntry] = field(default_factory=list)
    prompts: dict[tuple[bool, str], str] = field(default_factory=dict)
    """Excerpt of each case's prompt, by (is held out, case)."""
    held_out: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Environment and `prompt_key` of each held-out case."""
    rendered: dict[GroupKey, IndexEntry] = field(default_factory=dict)
    """The episode of each group whose record has the rendered prompt."""
    damaged: int = 0
    """Lines that are no records."""
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Of each file the inode, which is another one when it was replaced, and the bytes that were read."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Read lines that were written since the last refresh; all files again if one was replaced."""
        with self._lock:
            # plain files only: a link could lead anywhere
            plain = (path for path in sorted(self.path.glob("*.jsonl")) if path.is_file() and not path.is_symlink())
            found = {path: path.stat() for path in plain}
            for path, (inode, done) in self.files.items():
                stat = found.get(path)
                if stat is None or stat.st_ino != inode or stat.st_size < done:
                    self.entries, self.damaged, self.files = [], 0, {}
                    self.prompts, self.held_out, self.rendered = {}, {}, {}
                    break
            for path, stat in found.items():
                self._read_on(path, stat)

    def _read_on(self, path: Path, stat: os.stat_result) -> None:
        _, done = self.files.get(path, (0, 0))
        with open(path, "rb", opener=regular) as stream:
            stream.seek(done)
            for line, start, end in whole_lines(stream):
                done = end
                if not line.strip():
                    continue
                try:
                    record = RECORD.validate_json(line)
                except ValueError:
                    self.damaged += 1
                    continue
                entry = entry_of(record, len(self.entries), path, start, end - start)
                self.entries.append(entry)
                if record.rendered_prompt:
                    self.rendered[entry.group_key] = entry
                if (key := (entry.is_held_out, entry.case)) not in self.prompts:
                    self.prompts[key] = prompt_excerpt(record)
                    if entry.is_held_out:
                        self.held_out[entry.case] = entry.environment, prompt_key(record.prompt)
        self.files[path] = stat.st_ino, done

    def record(self, entry: IndexEntry) -> RolloutRecord:
        """The whole record, read from its file; all defaults if the file was replaced."""
        try:
            return RECORD.validate_json(self.raw(entry))
        except ValueError:
            return RolloutRecord()

    def raw(self, entry: IndexEntry) -> bytes:
        """The line of a record."""
        with entry.file.open("rb", buffering=0) as stream:
            return os.pread(stream.fileno(), entry.length, entry.offset)


def entry_of(record: RolloutRecord, number: int, file: Path, offset: int, length: int) -> IndexEntry:
    """The index entry of a record."""
    case_idx = "" if record.case_idx is None else str(record.case_idx)
    return IndexEntry(
        **{name: getattr(record, name) for name in FACTS},
        number=number,
        file=file,
        offset=offset,
        length=length,
        case=case_idx if record.row_number is None else str(record.row_number),
        case_idx=case_idx,
        lenient=record.metrics.get(LENIENT),
        failure=record.error.kind if record.error else "",
        turns=len(record.turns),
    )


def prompt_excerpt(record: RolloutRecord) -> str:
    """Excerpt of a prompt's last message, as the first one is often the system's; without a prompt, of the first one of
    the episode's messages."""
    prompt = record.prompt or record.messages[:1]
    text = prompt if isinstance(prompt, str) else as_text(prompt[-1].get("content")) if prompt else ""
    return short(text, EXCERPT)
