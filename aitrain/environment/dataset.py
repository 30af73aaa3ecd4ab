"""The rows of an environment's dataset, built and checked. Needs neither torch nor `datasets`: a Dataset of the latter
is recognised by its attributes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from aitrain.environment.contract import Case, call_with_tokenizer, copied, env_kind, is_message
from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.execution.user_code import failure_message

Datasets: TypeAlias = tuple[list[Case], list[Case] | None]
"""Training cases, and those of `build_eval_dataset`."""


def dataset_note(environment: object) -> str:
    """What an adapter has found out while it built the dataset, on one line; may be empty."""
    return str(getattr(environment, "dataset_note", ""))


def number_apart(built: Mapping[str, Datasets]) -> dict[str, Datasets]:
    """The datasets of each environment with its name, and with row numbers that no other environment has."""
    numbered, first = dict[str, Datasets](), 0
    for name, (train, held_out) in built.items():
        own = [
            [replace(case, number=first + case.number, env=name, first=first) for case in cases]
            for cases in (train, held_out or [])
        ]
        numbered[name] = own[0], None if held_out is None else own[1]
        first += sum(map(len, own))
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
    held_out = _call(build_eval, tokenizer, needs_prompt, len(train))
    if held_out[0].is_chat != train[0].is_chat:
        raise EnvironmentFailed("build_dataset and build_eval_dataset must have the same kind of prompt")
    return train, held_out


def columns(built: Datasets) -> set[str]:
    """Columns of every row, including held-out ones: the parameters available to `score_episode` in every episode."""
    train, held_out = built
    return set.intersection(*(set(case.row) for case in (*train, *(held_out or ()))))


def _call(method: Callable[..., object], tokenizer: object, needs_prompt: bool, first_number: int = 0) -> list[Case]:
    """The cases of a dataset, the first of which has this number."""
    name = getattr(method, "__name__", "build_dataset")
    rows: Any
    try:
        rows = call_with_tokenizer(method, tokenizer)
        if isinstance(rows, (Mapping, str, bytes)) or not isinstance(rows, Iterable):
            raise EnvironmentFailed(
                f"{name} returned {'None' if rows is None else 'a ' + type(rows).__name__}\n"
                "Return a datasets.Dataset or a list of dicts, one a case."
            )
        rows = copied(list(rows), shares_objects=True)  # the environment may change its list later
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(f"{name} raised", error)) from error
    if not rows:
        raise EnvironmentFailed(f"{name} returned no rows")
    first, cases = "", list[Case]()
    for number, row in enumerate(rows):
        kind = _kind_of_prompt(f"row {number} of {name}", row, needs_prompt)
        first = first or kind
        if (kind == "a string") != (first == "a string"):
            raise EnvironmentFailed(
                f"{name} mixes prompt types: row 0 has {first}, row {number} {kind}.\nUse one of the two in all rows."
            )
        place = first_number + number
        cases.append(Case(row.get("case_idx", place), row.get("prompt") or [], row, place))
    return cases


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
