"""The environment's dataset in training: built on the first process, and sent to the others."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, set_seed
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain.environment.contract import check_contract
from aitrain.environment.dataset import Datasets, build_cases, columns, dataset_note, number_apart
from aitrain.environment.loader import errors_of
from aitrain.environment.runner import EnvRunner
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.execution.failure import CallFailed
from aitrain.training.run_context import RunContext


def case_numbers(cases: Sequence[object]) -> datasets.Dataset:
    """A dataset for TRL with as many rows, each with its number as the prompt; TRL only counts them."""
    return datasets.Dataset.from_dict({"prompt": range(len(cases))})


def build_datasets(context: RunContext, tokenizer: PreTrainedTokenizerBase, processes: int) -> dict[str, Datasets]:
    """The datasets of each environment by its name, with the columns that its methods ask for.

    Raises:
        EnvironmentFailed: a dataset is wrong, or a method has an unknown parameter.
    """
    built = dict[str, Datasets]()
    for name, runner in context.runner.parts.items():
        context.enter(f"building the dataset{name and f' of {name}'}")
        set_seed(context.config.seed)
        with errors_of(name):
            built[name] = build(runner, tokenizer, processes)
            check_contract(runner.environment, columns(built[name]))
        if note := dataset_note(runner.environment):
            context.note(note, "info")
    if len({train.is_chat for train, _ in built.values()}) > 1:
        kinds = ", ".join(f"{name} has {'messages' if one.is_chat else 'strings'}" for name, (one, _) in built.items())
        raise EnvironmentFailed(f"rl_env: the prompts of all environments must be of one kind: {kinds}")
    return number_apart(built)


def build(runner: EnvRunner, tokenizer: PreTrainedTokenizerBase, ranks: int = 1) -> Datasets:
    """Build the environment's dataset, and the held-out one if it has `build_eval_dataset`. Attributes that building
    sets on the environment are copied to the environment's own processes, and to the other `ranks`.

    Raises:
        EnvironmentFailed: a dataset is missing, empty, or has invalid prompts, or an attribute cannot be copied.
    """
    environment, processes = runner.environment, runner.processes
    if ranks == 1 and processes is None:
        return build_cases(environment, tokenizer)
    before = _pickled_attributes(environment)
    built = build_cases(environment, tokenizer) if ranks == 1 else _build_once(environment, tokenizer, before)
    if processes is not None:
        try:
            processes.update(_changed_attributes(environment, before))
        except CallFailed as error:
            raise EnvironmentFailed(f"build_dataset set what another process cannot load: {error}") from error
    return built


# -- sending the dataset to all processes


def _build_once(
    environment: object, tokenizer: PreTrainedTokenizerBase, before: Mapping[str, bytes | None]
) -> Datasets:
    """Build on the first process and send the result, and the attributes that building changed, to the others.

    Building on every process could give different rows, and scores would belong to other prompts.
    """
    state = PartialState()
    built: Datasets | None = None
    sent: list[Any] = [None]
    if state.is_main_process:
        try:
            built = build_cases(environment, tokenizer)
            sent[0] = built, _changed_attributes(environment, before)
            pickle.dumps(sent)
        except AitrainError as error:
            sent[0] = error
        except Exception as error:
            sent[0] = EnvironmentFailed(
                f"The rows of build_dataset cannot be sent to the other processes: {type(error).__name__}: {error}\n"
                "Keep plain data in them: texts, numbers, lists, dicts."
            )
    if state.num_processes > 1:  # a dry run is a single process
        broadcast_object_list(sent)
    if isinstance(sent[0], AitrainError):
        raise sent[0]
    if built is None:
        built, changed = sent[0]
        _attributes(environment).update({name: pickle.loads(value) for name, value in changed.items()})
    return built


def _attributes(environment: object) -> dict[str, object]:
    attributes: dict[str, object] = getattr(environment, "__dict__", {})
    return attributes


def _pickled_attributes(environment: object) -> dict[str, bytes | None]:
    """Pickled attributes of the environment, to compare with later ones; None if an attribute cannot be pickled."""
    pickled: dict[str, bytes | None] = {}
    for name, value in _attributes(environment).items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception:
            pickled[name] = None  # a lock, a client, an open file: each process has its own
    return pickled


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


def check_chat_template(is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that there is a chat template if the model is asked in chat messages.

    Raises:
        ConfigError: there is none.
    """
    if is_chat and tokenizer.chat_template is None:
        raise ConfigError(
            "chat_template: the prompts are chat messages and this model's tokenizer has no chat template.\n"
            "Choose one with --chat-template chatml, or let build_dataset return prompts that are strings."
        )
