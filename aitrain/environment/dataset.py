"""The rows of an environment's dataset, built and checked. Needs neither torch nor `datasets`: a Dataset of the latter
is recognised by its attributes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

from aitrain.environment.contract import Case, call_with_tokenizer, copied, env_kind, is_message
from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.execution.user_code import failure_message

Row: TypeAlias = Mapping[str, Any]
Datasets: TypeAlias = "tuple[Cases, Cases | None]"
"""Training cases, and those of `build_eval_dataset`."""


class CaseSequence(Sequence[Case], ABC):
    """Cases by their places."""

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        return self.case_at(places) if isinstance(places, int) else list(map(self.case_at, places))

    @abstractmethod
    def case_at(self, place: int) -> Case:
        """The case at a place from 0 on."""


@dataclass(frozen=True)
class Cases(CaseSequence):
    """A selection of rows of the environment's dataset; rows are read on access, not copied."""

    rows: Sequence[Row]
    numbers: Sequence[int]
    """Selected row numbers, in order."""
    offset: int = 0
    """Added to row numbers: those of a separate held-out dataset follow those of the training dataset."""
    env: str = ""
    """Name of the environment, in a run with several."""
    first: int = 0
    """Number of the environment's first row among those of all environments."""

    def __len__(self) -> int:
        return len(self.numbers)

    def case_at(self, place: int) -> Case:
        """The case at a place from 0 on."""
        row, number = self.rows[self.numbers[place]], self.numbers[place] + self.offset
        return Case(
            row.get("case_idx", number), row.get("prompt") or [], row, number + self.first, self.env, self.first
        )

    @property
    def is_chat(self) -> bool:
        """Whether prompts are chat messages; all rows have the same kind."""
        return self.case_at(0).is_chat

    def select(self, numbers: Sequence[int]) -> Cases:
        """Another selection of the same dataset."""
        return replace(self, numbers=numbers)


class MixedCases(CaseSequence):
    """The cases of all environments of a run, one after another."""

    def __init__(self, parts: Sequence[Cases] = ()) -> None:
        self.parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def case_at(self, place: int) -> Case:
        """The case at a place from 0 on."""
        part = bisect_right(self._ends, place)
        return self.parts[part].case_at(place - (self._ends[part - 1] if part else 0))


def dataset_note(environment: object) -> str:
    """What an adapter has found out while it built the dataset, on one line; may be empty."""
    return str(getattr(environment, "dataset_note", ""))


def number_apart(built: Mapping[str, Datasets]) -> dict[str, Datasets]:
    """The datasets of each environment with its name, and with row numbers that no other environment has."""
    numbered, first = dict[str, Datasets](), 0
    for name, (train, held_out) in built.items():
        own = None if held_out is None else replace(held_out, env=name, first=first)
        numbered[name] = replace(train, env=name, first=first), own
        first += len(train.rows) + (0 if held_out is None else len(held_out.rows))
    return numbered


def fingerprint(cases: Iterable[Case]) -> str:
    """SHA-256 of all rows in order; equal in every process for equal content."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(canonical_text(case.row).encode(errors="replace"))
    return digest.hexdigest()


def canonical_text(value: object) -> str:
    """A canonical text of a value, without memory addresses and with sets in sorted order."""
    if isinstance(value, Mapping):
        items = (f"{canonical_text(key)}:{canonical_text(item)}" for key, item in value.items())
        return "{" + ",".join(sorted(items)) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(canonical_text, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(canonical_text, value)) + "]"
    if hasattr(value, "tolist"):  # the repr of arrays and tensors is abbreviated
        return canonical_text(value.tolist())
    text = f"{type(value).__qualname__} {value!r}"
    return type(value).__qualname__ if " at 0x" in text and not isinstance(value, str) else text


def build_cases(environment: object, tokenizer: object) -> Datasets:
    """Build the environment's dataset, and the held-out one if it has `build_eval_dataset`.

    Raises:
        EnvironmentFailed: a method or a dataset is missing, has no rows or invalid prompts, or building it raised.
    """
    needs_prompt = env_kind(environment) == "score_episode"
    build = getattr(environment, "build_dataset", None)
    if not callable(build):
        raise EnvironmentFailed(
            f"{type(environment).__name__} has no build_dataset: give it one that returns rows with a prompt"
        )
    train = _call(build, tokenizer, needs_prompt)
    build_eval = getattr(environment, "build_eval_dataset", None)
    if not callable(build_eval):
        return train, None
    held_out = replace(_call(build_eval, tokenizer, needs_prompt), offset=len(train.rows))
    if held_out.is_chat != train.is_chat:
        raise EnvironmentFailed("build_dataset and build_eval_dataset must have the same kind of prompt")
    return train, held_out


def columns(built: Datasets) -> set[str]:
    """Columns of every row, including held-out ones: the parameters available to `score_episode` in every episode."""
    names: list[set[str]] = []
    for cases in built:
        rows: Sequence[Row] = () if cases is None else cases.rows
        names += [set(rows.column_names)] if _is_dataset(rows) else [set(row) for row in rows]  # type: ignore[attr-defined]
    return set.intersection(*names)


def _is_dataset(value: object) -> bool:
    """Whether it is a `datasets.Dataset`, whose rows are read by number."""
    return all(hasattr(value, name) for name in ("column_names", "__getitem__", "__len__"))


def _call(method: Callable[..., object], tokenizer: object, needs_prompt: bool) -> Cases:
    name = getattr(method, "__name__", "build_dataset")
    rows: Any
    try:
        rows = call_with_tokenizer(method, tokenizer)
        if isinstance(rows, (Mapping, str, bytes)) or not isinstance(rows, Iterable):
            raise EnvironmentFailed(
                f"{name} returned {'None' if rows is None else 'a ' + type(rows).__name__}\n"
                "Return a datasets.Dataset or a list of dicts, one a case."
            )
        if not _is_dataset(rows):  # of which only len() and [] are used
            rows = copied(list(rows), shares_objects=True)  # the environment may change its list later
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(f"{name} raised", error)) from error
    if len(rows) == 0:
        raise EnvironmentFailed(f"{name} returned no rows")
    first = ""
    for number, row in enumerate(rows):
        kind = _kind_of_prompt(f"row {number} of {name}", row, needs_prompt)
        first = first or kind
        if (kind == "a string") != (first == "a string"):
            raise EnvironmentFailed(
                f"{name} mixes prompt types: row 0 has {first}, row {number} {kind}.\nUse one of the two in all rows."
            )
    return Cases(rows, range(len(rows)))


def _kind_of_prompt(place: str, row: object, needs_prompt: bool) -> str:
    """The kind of a row's prompt, in words for a message: a string, messages, or none.

    Raises:
        EnvironmentFailed: it is invalid, or missing where the environment cannot speak first.
    """
    if not isinstance(row, Mapping):
        raise EnvironmentFailed(f"{place} is a {type(row).__name__}: return dicts with a prompt")
    prompt = row.get("prompt")
    if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
        if not needs_prompt:
            return "none"
        if "prompt" not in row:
            raise EnvironmentFailed(f"{place} has no prompt (it has: {', '.join(map(str, row)) or 'nothing'})")
    elif isinstance(prompt, str):
        return "a string"
    elif isinstance(prompt, list) and all(map(is_message, prompt)):
        return "messages"
    raise EnvironmentFailed(
        f"{place} has an invalid prompt: {repr(prompt)[:60]}\n"
        'Use a string that is not empty, or messages: [{"role": "user", "content": "..."}]'
    )
