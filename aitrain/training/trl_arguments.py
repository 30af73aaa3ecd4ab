"""Translates a TrainConfig into arguments of GRPOConfig, also for a run that continues with another number of steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig

from aitrain.batch import BatchPlan
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import step_of
from aitrain.training.model import Precision, model_without_weights
from aitrain.training.sharding import fsdp_arguments


def grpo_arguments(config: TrainConfig, batch: BatchPlan, precision: Precision) -> dict[str, object]:
    """Arguments of GRPOConfig that follow from options, without `--trl`."""
    arguments: dict[str, object] = {
        "seed": config.seed,
        "per_device_train_batch_size": batch.share,
        "gradient_accumulation_steps": 1,  # forward passes are made by training/trainer.py
        "steps_per_generation": config.rl_updates_per_rollout,
        "num_train_epochs": config.epochs,
        "max_steps": -1 if config.max_steps is None else config.max_steps,
        "learning_rate": config.learning_rate,
        "optim": config.optimizer,
        "lr_scheduler_type": config.scheduler,
        "warmup_steps": config.warmup_ratio,  # below 1, transformers 5 takes it as a fraction of the steps
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "gradient_checkpointing": not config.disable_gradient_checkpointing,
        "bf16": precision.autocast == "bf16",
        "fp16": precision.autocast == "fp16",
        "use_cpu": precision.use_cpu,
        "ddp_timeout": config.ddp_timeout,
        "ddp_find_unused_parameters": False,  # every trained weight is used in every pass
        "logging_steps": max(1, config.logging_steps),
        "report_to": "none",  # done by training/tracking.py, where a failing tracker does not end the run
        "run_name": config.project_name,
        "save_strategy": IntervalStrategy(config.save_strategy),
        "save_steps": config.save_steps,
        "save_total_limit": config.save_total_limit,
        "eval_strategy": "no",  # held-out cases are scored by training/held_out_scoring.py
        "disable_tqdm": True,
        "trust_remote_code": config.trust_remote_code,  # for the reference model and vLLM
        # the algorithm
        "num_generations": config.rl_num_generations,
        "beta": config.rl_kl_coef,
        **config.loss,
        "entropy_coef": config.rl_entropy_coef,
        "mask_truncated_completions": config.rl_mask_truncated_completions,
        # generation
        "max_completion_length": config.completion_tokens,
        "temperature": config.rl_temperature,
        "top_k": config.rl_top_k,
        "top_p": config.rl_top_p,
    }
    if config.use_vllm and config.vllm_mode == "colocate":  # TRL runs vLLM
        arguments |= {
            "use_vllm": True,
            "vllm_mode": config.vllm_mode,
            "vllm_gpu_memory_utilization": config.vllm_memory,
            "vllm_tensor_parallel_size": config.vllm_tensor_parallel_size,
            "vllm_enable_sleep_mode": config.vllm_sleep_mode,
        }
    if config.distributed_backend == "fsdp2":
        arguments |= fsdp_arguments(config, model_without_weights(config, precision.dtype).num_parameters())
    return arguments


def refuse_zero_3(arguments: GRPOConfig) -> None:
    """Refuse weights that are sharded by DeepSpeed.

    Raises:
        ConfigError: they are.
    """
    plugin = arguments.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise ConfigError(
            "--trl deepspeed: ZeRO stage 3 shards the weights, which aitrain does with FSDP2 only\n"
            "Use stage 1 or 2, or --distributed-backend fsdp2 in place of DeepSpeed."
        )


LONG_COMPLETION = 1024
"""Tokens above which importance ratios are truncated per token: rounding dominates a product over more tokens."""


def fit_vllm(arguments: GRPOConfig, config: TrainConfig, completion: int, whole: int | None) -> int | None:
    """Set vLLM's lengths unless `--trl` sets them; returns vLLM's context length. `completion` and `whole`: maximum
    tokens of a completion, and of prompt and completion together."""
    if "vllm_max_model_length" not in config.trl:
        arguments.vllm_max_model_length = whole
    if "vllm_importance_sampling_mode" not in config.trl and completion > LONG_COMPLETION:
        arguments.vllm_importance_sampling_mode = "token_truncate"
    context: int | None = arguments.vllm_max_model_length
    return context


def grpo_config(arguments: dict[str, object], config: TrainConfig, output_dir: Path) -> GRPOConfig:
    """TRL's configuration, with the fields of `--trl`, which `check_trl_fields` has checked.

    Raises:
        ConfigError: a `--trl` field has a value that TRL refuses.
    """
    with explain_refusals():
        return GRPOConfig(output_dir=str(output_dir), **{**config.trl, **arguments})


@contextmanager
def explain_refusals() -> Iterator[None]:
    """Turn what TRL, transformers and peft raise for settings that do not fit the model into a ConfigError.

    Raises:
        ConfigError: they refuse the settings.
    """
    try:
        yield
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"TRL refuses these settings: {' '.join(str(error).split())[:400]}") from error


def refuse_fewer_steps(checkpoint: Path, steps: int) -> None:
    """Refuse to continue to a step that a checkpoint has passed.

    Raises:
        ConfigError: it has more steps.
    """
    if steps < (done := step_of(checkpoint)):
        raise ConfigError(
            f"max_steps: {checkpoint} has {done} steps behind it, more than {steps}\n"
            f"Use --max-steps {done} or more, or --resume-from-checkpoint with an earlier checkpoint."
        )
