"""The rows of an environment's dataset, built and checked. Needs neither torch nor `datasets`: a Dataset of the latter
is recognised by its attributes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from aitrain.environment.contract import Case, call_with_tokenizer, copied, env_kind, is_message, shown
from aitrain.errors import EnvironmentFailed
from aitrain.execution.user_code import users_errors

Datasets: TypeAlias = tuple[list[Case], list[Case]]
"""Training cases, and those of `build_eval_dataset`, none without that method."""


def dataset_note(environment: object) -> str:
    """What an adapter has found out while it built the dataset, on one line; may be empty."""
    return str(getattr(environment, "dataset_note", ""))


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


def build_cases(environment: object, tokenizer: object, name: str = "", first: int = 0) -> Datasets:
    """Build the environment's dataset, and the held-out one if it has `build_eval_dataset`. `name` and `first`: of
    several environments, the name of this one, and the number of its first row, as no two rows of a run have the same.

    Raises:
        EnvironmentFailed: a method or a dataset is missing, has no rows or invalid prompts, or building it raised.
    """
    needs_prompt = env_kind(environment) == "score_episode"
    build = getattr(environment, "build_dataset", None)
    if not callable(build):
        raise EnvironmentFailed(
            f"{type(environment).__name__} has no build_dataset: give it one that returns rows with a prompt"
        )
    train = _rows(build, tokenizer, needs_prompt)
    build_eval = getattr(environment, "build_eval_dataset", None)
    held_out = _rows(build_eval, tokenizer, needs_prompt) if callable(build_eval) else []
    cases = [
        Case(row.get("case_idx", number), row.get("prompt") or [], row, first + number, name, first)
        for number, row in enumerate((*train, *held_out))
    ]
    for case in cases:
        if case.is_chat != cases[0].is_chat:
            raise EnvironmentFailed(
                f"The rows mix prompt types: of row 0 and row {case.own_number}, one has a string, the other messages"
                " or none\nUse one of the two in all rows, those of build_eval_dataset included."
            )
    return cases[: len(train)], cases[len(train) :]


def columns(built: Datasets) -> set[str]:
    """Columns of every row, including held-out ones: the parameters available to `score_episode` in every episode."""
    train, held_out = built
    return set.intersection(*(set(case.row) for case in (*train, *held_out)))


def _rows(method: Callable[..., object], tokenizer: object, needs_prompt: bool) -> list[Mapping[str, Any]]:
    """The rows of a dataset, with valid prompts; `needs_prompt`: the environment cannot speak first."""
    name = getattr(method, "__name__", "build_dataset")
    with users_errors(f"{name} raised"):
        returned = call_with_tokenizer(method, tokenizer)
        if isinstance(returned, (Mapping, str, bytes)) or not isinstance(returned, Iterable):
            raise EnvironmentFailed(
                f"{name} returned {shown(returned)}\nReturn a datasets.Dataset or a list of dicts, one a case."
            )
        rows: list[Any] = copied(list(returned), shares_objects=True)  # the environment may change its list later
    if not rows:
        raise EnvironmentFailed(f"{name} returned no rows")
    for number, row in enumerate(rows):
        place = f"row {number} of {name}"
        if not isinstance(row, Mapping):
            raise EnvironmentFailed(f"{place} is a {type(row).__name__}: return dicts with a prompt")
        given = row.get("prompt")
        prompt = [] if given is None else given
        is_prompt = isinstance(prompt, str) or (isinstance(prompt, list) and all(map(is_message, prompt)))
        if not is_prompt or (needs_prompt and not prompt):
            others = ", ".join(map(str, row)) or "none"
            raise EnvironmentFailed(
                f"{place} has no valid prompt: {repr(given)[:60]} (its columns: {others})\n"
                'Use a string that is not empty, or messages: [{"role": "user", "content": "..."}]'
            )
    return rows
