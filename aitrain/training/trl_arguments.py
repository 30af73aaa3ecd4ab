"""Our words in TRL's words: a TrainConfig as the arguments of GRPOConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import get_scheduler
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig

from aitrain.batch import BatchPlan
from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.train import TrainConfig
from aitrain.training.model import Precision


def grpo_arguments(config: TrainConfig, batch: BatchPlan, precision: Precision) -> dict[str, Any]:
    """Every argument of GRPOConfig that follows from our options, `--trl` not included."""
    return {
        **_training(config, batch, precision),
        **_algorithm(config),
        **_generation(config),
        **(_vllm(config) if trl_generates(config) else {}),
    }


def trl_generates(config: TrainConfig) -> bool:
    """Whether TRL's own vLLM is used: inside the training processes, or by NCCL."""
    return config.use_vllm and config.weight_sync in (None, "nccl")


def refuse_sharded(arguments: GRPOConfig, config: TrainConfig) -> None:
    """Adapters and files are written by one process, which has to have all weights.

    Raises:
        ConfigError: each process would have a part of them.
    """
    way, sync = _sharding(arguments), config.weight_sync
    if way and sync in ("adapter", "disk"):
        raise ConfigError(
            f"vllm_sync: with {way} each process has a part of the weights, and none could write them for the server"
            f" ({sync})\nSay --vllm-mode colocate, or --vllm-sync nccl with a server of yours, or train without {way}."
        )


def _sharding(arguments: GRPOConfig) -> str:
    """What cuts the weights into parts, by `--trl` or by accelerate's variables; nothing: nobody does."""
    plugin = arguments.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3"
    return "FSDP" if arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP") else ""


def _refuse_rounding(arguments: GRPOConfig) -> None:
    """TRL turns the model to half precision before each generation by continuous batching, and leaves it so."""
    if arguments.use_transformers_continuous_batching and (arguments.bf16 or arguments.fp16):
        raise ConfigError(
            "--trl use_transformers_continuous_batching: TRL rounds the trained weights to half precision for it\n"
            "Leave it out, or add --mixed-precision no; --use-vllm generates faster."
        )


def _refuse_moving_a_sharded_reference(arguments: GRPOConfig) -> None:
    """A checkpoint holds the reference model as one process has it, which is a part of it where it is sharded."""
    if arguments.sync_ref_model and (way := _sharding(arguments)):
        raise ConfigError(
            f"--trl sync_ref_model: with {way} checkpoints lack the reference model: no run could be resumed exactly\n"
            f"Leave it out, or train without {way}."
        )


def _training(config: TrainConfig, batch: BatchPlan, precision: Precision) -> dict[str, Any]:
    return {
        "seed": config.seed,
        "per_device_train_batch_size": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "num_train_epochs": config.epochs,
        "max_steps": -1 if config.max_steps is None else config.max_steps,
        "learning_rate": config.lr,
        "optim": config.optimizer,
        "lr_scheduler_type": config.scheduler,
        "warmup_steps": config.warmup_ratio,  # below 1, transformers 5 takes it for a share of the steps
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "gradient_checkpointing": not config.disable_gradient_checkpointing,
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "use_cpu": precision.use_cpu,
        "ddp_timeout": config.ddp_timeout,
        "ddp_find_unused_parameters": False,  # every weight that trains is used in every pass
        "logging_steps": max(1, config.logging_steps),
        "report_to": "none",  # training/tracking.py does, so that a tracker that fails ends no run
        "run_name": config.project_name,
        "save_strategy": IntervalStrategy(config.save_strategy),
        "save_steps": config.save_steps,
        "save_total_limit": config.save_total_limit,
        "eval_strategy": "no",  # held-out cases are scored by training/evaluation.py
        "disable_tqdm": True,
        "trust_remote_code": config.trust_remote_code,  # the reference model's, and vLLM's
    }


def _algorithm(config: TrainConfig) -> dict[str, Any]:
    return {
        "num_generations": config.rl_num_generations,
        "beta": config.rl_kl_coef,
        **{name: value for name, value in config.loss.as_trl().items() if name not in config.trl},
        "mask_truncated_completions": config.rl_mask_truncated_completions,
    }


def _generation(config: TrainConfig) -> dict[str, Any]:
    return {
        "max_completion_length": config.rl_max_new_tokens,
        "temperature": config.rl_temperature,
        "top_k": config.rl_top_k,
        "top_p": config.rl_top_p,
        "min_p": config.rl_min_p or None,
        "repetition_penalty": config.rl_repetition_penalty,
    }


def _vllm(config: TrainConfig) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_mode": config.vllm_mode,
        "vllm_gpu_memory_utilization": config.vllm_memory,
        "vllm_server_base_url": config.vllm_server_url,
        "vllm_tensor_parallel_size": config.vllm_tensor_parallel_size,
        "vllm_enable_sleep_mode": config.vllm_sleep_mode,
    }


LONG = 1024
"""Tokens of a completion from which its importance ratio, the product of its tokens', says more of rounding than of the
policy: then the ratio is bounded token by token, where TRL would leave whole completions out."""


def fit_vllm(arguments: GRPOConfig, config: TrainConfig, lengths: Lengths) -> int | None:
    """What vLLM is told of lengths, unless `--trl` has said it; returns the most tokens that vLLM will hold."""
    if "vllm_max_model_length" not in config.trl:
        arguments.vllm_max_model_length = lengths.whole
    if "vllm_importance_sampling_mode" not in config.trl and lengths.completion > LONG:
        arguments.vllm_importance_sampling_mode = "token_truncate"
    most: int | None = arguments.vllm_max_model_length
    return most


@dataclass(frozen=True)
class Lengths:
    """Most tokens that there will be, of a completion and of prompt and completion together."""

    completion: int
    whole: int | None


def grpo_config(arguments: dict[str, Any], config: TrainConfig, output_dir: Path) -> GRPOConfig:
    """TRL's own configuration, `--trl` fields included.

    Raises:
        ConfigError: a `--trl` field is unknown, is one of our options by TRL's name, or has a value that TRL refuses.
    """
    for name in config.trl:
        _refuse_wrong_field(name, arguments)
    try:
        made = GRPOConfig(output_dir=str(output_dir), **{**arguments, **config.trl})
    except Exception as error:
        raise _refused(error) from error
    _refuse_rounding(made)
    _refuse_moving_a_sharded_reference(made)
    return made


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"TRL refuses these settings: {' '.join(str(error).split())[:400]}")


def fit_warmup(arguments: GRPOConfig) -> str | None:
    """Drop a warm-up that takes the whole run, as in a run of one step: the rate of the first step of a warm-up is 0.
    Returns what to tell the user.

    Raises:
        ConfigError: the learning rate is 0 in every step without a warm-up as well.
    """
    if arguments.deepspeed is not None or _has_rate(arguments):  # DeepSpeed may bring a schedule of its own
        return None
    arguments.warmup_steps = 0
    steps = arguments.max_steps
    if not _has_rate(arguments):
        raise ConfigError(
            f"scheduler: with {arguments.lr_scheduler_type.value} the learning rate is 0 in all {steps} steps"
        )
    return f"Too few steps to warm up ({steps}): the learning rate begins at --lr."


def _has_rate(arguments: GRPOConfig) -> bool:
    """Whether the learning rate is above 0 in some step."""
    optimizer, steps = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate), arguments.max_steps
    kwargs = arguments.lr_scheduler_kwargs
    try:
        scheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(steps), steps, kwargs or {}
        )
    except (ValueError, TypeError) as error:
        raise _refused(error) from error
    try:
        for _ in range(steps):
            if optimizer.param_groups[0]["lr"] > 0:
                return True
            optimizer.step()
            scheduler.step()
    except ZeroDivisionError:  # polynomial, where nothing is left after the warm-up
        pass
    return False


def _refuse_wrong_field(name: str, arguments: dict[str, Any]) -> None:
    if name in arguments or name == "output_dir":
        raise ConfigError(f"--trl {name}: aitrain has an option for it, see docs/options.md\nUse the option.")
    if name not in GRPOConfig.__dataclass_fields__:
        raise ConfigError(f"--trl {name}: TRL has no such field.{did_you_mean(name, GRPOConfig.__dataclass_fields__)}")
