"""The environment's dataset: built on the first process, and sent to the others."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast, overload

import datasets
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain.environment.contract import Case, call_with_tokenizer
from aitrain.environment.row_copies import copy_rows
from aitrain.environment.runner import EnvRunner
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.execution.failure import CallFailed
from aitrain.execution.user_code import failure_message

Row: TypeAlias = Mapping[str, Any]
Datasets: TypeAlias = "tuple[Cases, Cases | None]"


@dataclass(frozen=True)
class Cases(Sequence[Case]):
    """A selection of rows of the environment's dataset; rows are read on access, not copied."""

    rows: Sequence[Row]
    numbers: Sequence[int]
    """Selected row numbers, in order."""
    offset: int = 0
    """Added to row numbers: those of a separate held-out dataset follow those of the training dataset."""

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Case: ...

    @overload
    def __getitem__(self, index: slice) -> list[Case]: ...

    def __getitem__(self, index: int | slice) -> Case | list[Case]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, number = self.rows[self.numbers[index]], self.numbers[index] + self.offset
        return Case(row.get("case_idx", number), row["prompt"], row, number)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are chat messages; all rows have the same kind."""
        return self[0].is_chat

    def select(self, numbers: Sequence[int]) -> Cases:
        """Another selection of the same dataset."""
        return replace(self, numbers=numbers)

    def as_dataset(self) -> datasets.Dataset:
        """A dataset for TRL with one column, `case`, the index; rows do not pass through Arrow, which would change
        Python objects in them."""
        return datasets.Dataset.from_dict({"case": list(range(len(self)))})


def fingerprint(cases: Cases) -> str:
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
    return type(value).__qualname__ if " at 0x" in text else text


def build(runner: EnvRunner, tokenizer: PreTrainedTokenizerBase, ranks: int = 1) -> Datasets:
    """Build the environment's dataset, and the held-out one if it has `build_eval_dataset`. Attributes that building
    sets on the environment are copied to the environment's own processes, and to the other `ranks`.

    Raises:
        EnvironmentFailed: a dataset is missing, empty, or has invalid prompts, or an attribute cannot be copied.
    """
    environment, processes = runner.environment, runner.processes
    before = {} if processes is None else _pickled_attributes(environment)
    built = _on_first_process(environment, lambda: _build_both(environment, tokenizer), ranks)
    if processes is not None:
        try:
            processes.update(_changed_attributes(environment, before))
        except CallFailed as error:
            raise EnvironmentFailed(f"build_dataset set what another process cannot load: {error}") from error
    return built


def _build_both(environment: object, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    train = _call(cast(Any, environment).build_dataset, tokenizer)
    build_eval = getattr(environment, "build_eval_dataset", None)
    if not callable(build_eval):
        return train, None
    held_out = replace(_call(build_eval, tokenizer), offset=len(train.rows))
    if held_out.is_chat != train.is_chat:
        raise EnvironmentFailed("build_dataset and build_eval_dataset must have the same kind of prompt")
    return train, held_out


def _call(method: Callable[..., object], tokenizer: PreTrainedTokenizerBase) -> Cases:
    name = getattr(method, "__name__", "build_dataset")
    try:
        rows = _as_rows(name, call_with_tokenizer(method, tokenizer))
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(f"{name} raised", error)) from error
    _check_rows(name, rows)
    return Cases(rows, range(len(rows)))


def _as_rows(name: str, returned: object) -> Sequence[Row]:
    if isinstance(returned, datasets.Dataset):
        return cast(Sequence[Row], returned)  # only len() and [] are used
    if isinstance(returned, Iterable) and not isinstance(returned, (str, bytes, Mapping)):
        return cast(Sequence[Row], copy_rows(list(returned)))  # the environment may change its list later
    splits = f": return one of {', '.join(map(repr, returned))}" if isinstance(returned, datasets.DatasetDict) else ""
    raise EnvironmentFailed(
        f"{name} returned {'None' if returned is None else 'a ' + type(returned).__name__}{splits}\n"
        "Return a datasets.Dataset or a list of dicts, one a case."
    )


def _check_rows(name: str, rows: Sequence[Row]) -> None:
    if len(rows) == 0:
        raise EnvironmentFailed(f"{name} returned no rows: there is nothing to train on")
    first_is_chat = None
    for number, row in enumerate(rows):
        _check_prompt(f"row {number} of {name}", row)
        is_chat = not isinstance(row["prompt"], str)
        first_is_chat = is_chat if first_is_chat is None else first_is_chat
        if is_chat != first_is_chat:
            raise EnvironmentFailed(
                f"{name} mixes prompt types: row 0 has {'messages' if first_is_chat else 'a string'},"
                f" row {number} {'messages' if is_chat else 'a string'}.\nUse one of the two in all rows."
            )


def _check_prompt(place: str, row: object) -> None:
    if not isinstance(row, Mapping):
        raise EnvironmentFailed(f"{place} is a {type(row).__name__}: return dicts with a prompt")
    if "prompt" not in row:
        raise EnvironmentFailed(f"{place} has no prompt (it has: {', '.join(map(str, row)) or 'nothing'})")
    if not _is_prompt(row["prompt"]):
        raise EnvironmentFailed(
            f"{place} has an invalid prompt: {repr(row['prompt'])[:60]}\n"
            'Use a string that is not empty, or messages: [{"role": "user", "content": "..."}]'
        )


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(_is_message(message) for message in prompt)


def _is_message(message: object) -> bool:
    """Whether a chat message has text, parts or tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), (str, list)) or bool(message.get("tool_calls"))


def columns(built: Datasets) -> set[str]:
    """Columns of every row, including held-out ones: the parameters available to `score_episode` in every episode."""
    names: list[set[str]] = []
    for cases in built:
        rows = () if cases is None else cases.rows
        names += [set(rows.column_names)] if isinstance(rows, datasets.Dataset) else [set(row) for row in rows]
    return set.intersection(*names)


# -- sending the dataset to all processes


def _on_first_process(environment: object, build_both: Callable[[], Datasets], ranks: int) -> Datasets:
    """Build on the first process and send the result, and the attributes that building changed, to the others.

    Building on every process could give different rows, and scores would belong to other prompts.
    """
    if ranks == 1:
        return build_both()
    state = PartialState()
    built: Datasets | None = None
    packed: list[AitrainError | bytes | None] = [None]
    if state.is_main_process:
        try:
            built, packed[0] = _packed(environment, build_both)
        except AitrainError as error:
            packed = [error]
    if state.num_processes > 1:  # a dry run is a single process
        broadcast_object_list(packed)
    received = packed[0]
    if isinstance(received, AitrainError):
        raise received
    if built is None:
        assert received is not None
        built, changed = cast("tuple[Datasets, dict[str, bytes]]", pickle.loads(received))
        _attributes(environment).update({name: pickle.loads(value) for name, value in changed.items()})
    return built


def _packed(environment: object, build_both: Callable[[], Datasets]) -> tuple[Datasets, bytes]:
    """The datasets; and, pickled for the other processes, the datasets and the attributes that building them changed.

    Raises:
        EnvironmentFailed: a row, or a new attribute, cannot be pickled.
    """
    before = _pickled_attributes(environment)
    built = build_both()
    changed = _changed_attributes(environment, before)
    try:
        return built, pickle.dumps((built, changed))
    except Exception as error:
        raise EnvironmentFailed(
            f"The rows of build_dataset cannot be sent to the other processes: {type(error).__name__}: {error}\n"
            "Keep plain data in them: texts, numbers, lists, dicts."
        ) from error


def _attributes(environment: object) -> dict[str, object]:
    attributes: dict[str, object] = getattr(environment, "__dict__", {})
    return attributes


def _pickled_attributes(environment: object) -> dict[str, bytes | None]:
    """Pickled attributes of the environment, to compare with later ones; None if an attribute cannot be pickled."""
    return {name: _pickled(value) for name, value in _attributes(environment).items()}


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None  # a lock, a client, an open file: each process has its own


def _changed_attributes(environment: object, before: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """Pickled attributes that changed since `before`, for the environment in other processes.

    Raises:
        EnvironmentFailed: a new attribute cannot be pickled.
    """
    now = _pickled_attributes(environment)
    lost = [name for name, value in now.items() if value is None and name not in before]
    if lost:
        raise EnvironmentFailed(
            f"build_dataset set self.{lost[0]}, which cannot be copied to the other processes.\n"
            "Set it in __init__, which runs on every process."
        )
    return {name: value for name, value in now.items() if value is not None and value != before.get(name)}


def check_chat_template(cases: Cases, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that there is a chat template for chat prompts.

    Raises:
        ConfigError: there is none.
    """
    if cases.is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            "chat_template: the prompts are chat messages and this model's tokenizer has no chat template.\n"
            "Choose one with --chat-template chatml, or let build_dataset return prompts that are strings."
        )
