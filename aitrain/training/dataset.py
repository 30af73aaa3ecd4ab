"""The environment's dataset in training: built on the first process, and sent to the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping

import datasets
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain.environment.dataset import Cases, Datasets, build_cases
from aitrain.environment.runner import EnvRunner
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.execution.failure import CallFailed


def case_numbers(cases: Cases) -> datasets.Dataset:
    """A dataset for TRL with one column, `case`, the index; rows do not pass through Arrow, which would change Python
    objects in them."""
    return datasets.Dataset.from_dict({"case": list(range(len(cases)))})


def build(runner: EnvRunner, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Build the environment's dataset, and the held-out one if it has `build_eval_dataset`. Attributes that building
    sets on the environment are copied to the environment's own processes.

    Raises:
        EnvironmentFailed: a dataset is missing, empty, or has invalid prompts, or an attribute cannot be copied.
    """
    environment, processes = runner.environment, runner.processes
    before = {} if processes is None else _pickled_attributes(environment)
    built = _on_first_process(environment, lambda: build_cases(environment, tokenizer))
    if processes is not None:
        try:
            processes.update(_changed_attributes(environment, before))
        except CallFailed as error:
            raise EnvironmentFailed(f"build_dataset set what another process cannot load: {error}") from error
    return built


# -- sending the dataset to all processes


def _on_first_process(environment: object, build_both: Callable[[], Datasets]) -> Datasets:
    """Build on the first process and send the result, and the attributes that building changed, to the others.

    Building on every process could give different rows, and scores would belong to other prompts.
    """
    state = PartialState()
    if state.num_processes == 1:
        return build_both()
    parcel: list[AitrainError | tuple[Datasets, dict[str, bytes]] | None] = [None]
    if state.is_main_process:
        before = _pickled_attributes(environment)
        try:
            parcel = [(build_both(), _changed_attributes(environment, before))]
        except AitrainError as error:
            parcel = [error]
    broadcast_object_list(parcel)
    received = parcel[0]
    if isinstance(received, AitrainError):
        raise received
    assert received is not None
    built, changed = received
    _attributes(environment).update({name: pickle.loads(value) for name, value in changed.items()})
    return built


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
