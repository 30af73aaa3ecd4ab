"""Checks a run as far as that is possible without the weights of its model.

Inside API of transformers 5.17 and TRL 1.16 that it uses (tests/training/test_upstream.py):

    Trainer._move_model_to_device(model, device)    overridden: a model without weights cannot be moved
    GRPOConfig.world_size                           replaced: generation batches are divided by it
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from aitrain.environment.dataset import Datasets
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.events import NotChecked
from aitrain.training.dataset import build_datasets, case_numbers
from aitrain.training.model import choose_precision, is_out_of_reach, load_tokenizer, model_without_weights
from aitrain.training.preparation import fit_to_model, prepare_cases, run_manifest
from aitrain.training.provenance import describe_run
from aitrain.training.run_context import RunContext
from aitrain.training.trainer import TrainerInputs
from aitrain.training.trainer_checkpoint import resumed_eval_state
from aitrain.training.trl_arguments import check_optimizer, explain_refusals


def check_run(context: RunContext, processes: int, check_cases: Callable[[dict[str, Datasets]], None]) -> None:
    """Prepare a run in this process, for the given number of processes and with a model without weights.

    Raises:
        AitrainError: as `preparation.prepare` does.
    """
    with _as_if_ranks(processes):
        _check_run(context, processes, check_cases)


@contextmanager
def _as_if_ranks(count: int) -> Iterator[None]:
    """Let TRL divide its batches by the number of processes of the run, not of this dry run."""
    GRPOConfig.world_size = property(lambda _: count)
    try:
        yield
    finally:
        del GRPOConfig.world_size  # what it inherits


def _check_run(context: RunContext, processes: int, check_cases: Callable[[dict[str, Datasets]], None]) -> None:
    config, precision = context.config, choose_precision(context.config)
    try:
        prepared = prepare_cases(context, precision, processes, context.enter)
    except ConfigError as error:
        if not is_out_of_reach(error):
            raise
        check_cases(_cases_without_tokenizer(context, processes))
        return
    check_cases(prepared.built)
    context.enter("preparing the trainer")
    inputs, parts = fit_to_model(context, prepared, model_without_weights(config, precision.dtype))
    if inputs.arguments.fsdp:
        context.announce(NotChecked("TRL's trainer with FSDP2, which needs all processes"))
    else:
        _check_trainer(inputs)
    facts = describe_run(context.runner)
    resumed_eval_state(context, run_manifest(context, inputs.cases, facts, processes))
    context.note(
        f"{parts}, {inputs.arguments.max_steps} steps.",
        "info",
    )
    if config.trl_table("model_init_kwargs"):
        context.announce(NotChecked("--trl model_init_kwargs, which are used with the weights"))


def _cases_without_tokenizer(context: RunContext, processes: int) -> dict[str, Datasets]:
    """The datasets, built with the tokenizer of `tiny`: the model's own cannot be had."""
    config = context.config
    context.announce(
        NotChecked(
            f"{config.model}: it is not on this machine and the Hub cannot be reached. So its name, its chat template,"
            " the length of the prompts, how many cases fit, and what TRL refuses with it are unknown"
        )
    )
    stand_in = load_tokenizer(config.model_copy(update={"model": "tiny", "chat_template": None}))
    try:
        return build_datasets(context, stand_in, processes)
    except EnvironmentFailed as error:
        error.args = (f"{error}\n(built with the tokenizer of `tiny`, as that of {config.model} cannot be had)",)
        raise


class _TrainerWithoutWeights(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer of a model on torch's meta device."""

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """No-op: there is nothing to move."""


def _check_trainer(inputs: TrainerInputs) -> None:
    """Make TRL's trainer with these inputs, but without vLLM and without a reference model, which would be loaded.

    Raises:
        ConfigError: TRL, transformers or peft refuse an option.
    """
    arguments = inputs.arguments
    arguments.use_vllm, arguments.beta, arguments.sync_ref_model = False, 0.0, False

    def unused(**_: Any) -> list[None]:
        return []

    with explain_refusals(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
        check_optimizer(arguments, inputs.model)
        _TrainerWithoutWeights(
            model=inputs.model,
            reward_funcs=[unused],
            args=arguments,
            train_dataset=case_numbers(inputs.cases),
            processing_class=inputs.tokenizer,
            peft_config=inputs.peft_config,
            rollout_func=unused,
        )
