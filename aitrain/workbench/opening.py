"""Constructs an environment and builds its datasets, for the commands of `aitrain env`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.environment.contract import Case, call_with_tokenizer, check_contract, check_methods
from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.environment.row_copies import copy_rows
from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.execution.user_code import failure_message
from aitrain.options.train import TrainConfig


@dataclass(frozen=True)
class OpenedEnvironment:
    """A constructed environment with its cases."""

    environment: Any
    cases: Sequence[Case]
    held_out: Sequence[Case]
    """Cases of build_eval_dataset; empty without that method."""


class NoTokenizer:
    """The `tokenizer` argument of an environment that is opened without one; every use raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EnvironmentFailed(f"The environment uses the tokenizer (tokenizer.{name}): name one with --tokenizer")


def construct(config: TrainConfig) -> object:
    """Import and construct the environment of the options.

    Raises:
        AitrainError: it cannot be found, imported or constructed, or a method is missing.
    """
    environment = load_env(find_env(config), config.rl_env_config or {})
    check_methods(environment)
    return environment


def open_environment(config: TrainConfig, tokenizer: object | None = None) -> OpenedEnvironment:
    """Construct the environment of the options, and build its datasets.

    Raises:
        AitrainError: it cannot be constructed, or a dataset or the methods' parameters are wrong.
    """
    environment = construct(config)
    cases, held_out = build_cases(environment, tokenizer)
    check_contract(environment, _columns([*cases, *held_out]))
    return OpenedEnvironment(environment, cases, held_out)


def build_cases(environment: Any, tokenizer: object | None = None) -> tuple[Sequence[Case], Sequence[Case]]:
    """The cases of `build_dataset`, and those of `build_eval_dataset` (none without that method).

    Raises:
        EnvironmentFailed: a dataset is missing, empty, or has wrong rows.
    """
    cases = _build(environment.build_dataset, tokenizer or NoTokenizer(), 0)
    build_eval = getattr(environment, "build_eval_dataset", None)
    held_out = _build(build_eval, tokenizer or NoTokenizer(), len(cases)) if callable(build_eval) else []
    return cases, held_out


def _build(method: Callable[..., object], tokenizer: object, first: int) -> list[Case]:
    name = getattr(method, "__name__", "build_dataset")
    try:
        returned = call_with_tokenizer(method, tokenizer)
        if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
            raise EnvironmentFailed(f"{name} returned a {type(returned).__name__}: return a list of dicts, one a case")
        rows = copy_rows(list(returned))
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(f"{name} raised", error)) from error
    if not rows:
        raise EnvironmentFailed(f"{name} returned no rows: there is nothing to train on")
    return [_case(name, number, row, first) for number, row in enumerate(rows)]


def _case(name: str, number: int, row: object, first: int) -> Case:
    if not isinstance(row, Mapping):
        raise EnvironmentFailed(f"row {number} of {name} is a {type(row).__name__}: return dicts with a prompt")
    if not row.get("prompt"):
        raise EnvironmentFailed(f"row {number} of {name} has no prompt")
    return Case(row.get("case_idx", first + number), row["prompt"], row, first + number)


def _columns(cases: Sequence[Case]) -> set[str]:
    return set.intersection(*(set(case.row) for case in cases))
