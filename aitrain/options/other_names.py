"""Names of other libraries: what `--trl` may hold, and the option of ours that means the same, for error messages.

GRPOConfig's fields are read from TRL's source, because importing it takes seconds; fields that would change nothing in
a run are refused.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.value_types import shown
from aitrain.packages import installed

if TYPE_CHECKING:
    from aitrain.options.train import TrainConfig

OPTION_OF_FIELD = {
    "beta": "rl_kl_coef",
    "epsilon_high": "rl_clip_range_high",
    "importance_sampling_level": "rl_loss_type",
    "bf16": "mixed_precision=bf16",
    "epsilon": "rl_clip_range",
    "fp16": "mixed_precision=fp16",
    "fsdp": "distributed_backend",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_checkpointing": "disable_gradient_checkpointing",
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler",
    "max_completion_length": "rl_max_new_tokens",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "per_device_train_batch_size": "batch_size",
    "report_to": "log",
    "run_name": "project_name",
    "steps_per_generation": "rl_updates_per_rollout",
    "vllm_enable_sleep_mode": "vllm_sleep_mode",
    "warmup_steps": "warmup_ratio",
}
"""Fields that follow from an option of another name, unless only `rl_` is missing. tests/test_preflight.py keeps it
equal to what is handed to TRL."""

SET_BY_AITRAIN = ("ddp_find_unused_parameters", "disable_tqdm", "fsdp_config", "use_cpu")
"""Fields that aitrain sets by itself."""

_SOURCES = (("trl", "trainer/grpo_config.py"), ("trl", "trainer/base_config.py"), ("transformers", "training_args.py"))


def check_trl_fields(config: TrainConfig) -> None:
    """Refuse a field that TRL does not have, that has an option, whose value has the wrong type, or that this run would
    not use.

    Raises:
        ConfigError: for the first of them, with what to use in its place.
    """
    fields, options = trl_fields() if config.trl else {}, type(config).model_fields
    for name, value in config.trl.items():
        if name in ADVICE:
            raise ConfigError(f"trl: {name}: has no effect here\n{ADVICE[name]}")
        if option := same_option(name, options):
            raise ConfigError(f"trl: {name}: aitrain has an option for it: {option}")
        if fields and name not in fields:
            raise ConfigError(f"trl: {name}: TRL has no such field.{did_you_mean(name, fields)}")
        if not has_type(kind := fields.get(name, "object"), value):
            raise ConfigError(f"trl: {name}: must be {kind.replace(' | ', ' or ')}, not {value!r}")
        if name.startswith("vllm_") and value not in (None, False) and not config.use_vllm:
            raise ConfigError(f"trl: {name}: has no effect here\nAdd use_vllm, or leave it out.")
    for key in config.trl_table("model_init_kwargs"):
        place = f"trl: model_init_kwargs: {key}"
        if option := same_option(key, options):
            raise ConfigError(f"{place}: aitrain has an option for it: {option}")
        if config.use_vllm:
            raise ConfigError(f"{place} would not reach vLLM: use a model folder whose config.json has these settings")


@cache
def trl_fields() -> dict[str, str]:
    """GRPOConfig's fields with their types, as TRL and transformers write them; empty if these are not installed."""
    found: dict[str, str] = {}
    for package, file in _SOURCES:
        if (spec := installed(package)) and spec.origin:
            text = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
            for kind in ast.parse(text).body:
                for field in kind.body if isinstance(kind, ast.ClassDef) else ():
                    if isinstance(field, ast.AnnAssign):
                        found.setdefault(ast.unparse(field.target), ast.unparse(field.annotation))
    return found


def has_type(annotation: str, value: object) -> bool:
    """Whether a value has the type of an annotation; True also for types of transformers and TRL."""
    try:
        TypeAdapter(annotation.replace("Any", "object")).validate_python(value, strict=True)  # type: ignore[arg-type]
    except PydanticUserError:  # it is not defined here
        return True
    except ValidationError:
        return False
    return True


# -- names that are no option

SAME_AS = {
    **OPTION_OF_FIELD,
    # TRL's ModelConfig, ScriptArguments and generation fields
    "model_name_or_path": "model",
    "use_peft": "peft",
    "lora_target_modules": "target_modules",
    "load_in_4bit": "quantization=int4",
    "load_in_8bit": "quantization=int8",
    "torch_dtype": "dtype",
    "hub_model_id": "repo_id",
    "hub_private_repo": "hub_private",
    "load_best_model_at_end": "save_best",
    "early_stopping_patience": "patience",
    "max_tool_calling_iterations": "rl_max_turns",
    "generation_batch_size": "rl_updates_per_rollout",
    "vllm_server_base_url": "vllm_server_url",
    # AITraining
    "base_model": "model",
    "use_flash_attention_2": "attn_implementation=flash_attention_2",
    "rl_env_type": "rl_env",
    "n_trials": "trials",
    "chat_format": "chat_template",
    "rl_mini_batch_size": "batch_size",
    "auto_find_batch_size": "batch_size",
    "block_size": "rl_max_prompt_length",
    "grad_clip_value": "max_grad_norm",
    "load_state_from": "resume_from_checkpoint",
    "save_state_every_n_steps": "save_steps",
    # Unsloth
    "model_name": "model",
    "max_seq_length": "model_max_length",
    "fast_inference": "use_vllm",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "unsloth_vllm_standby": "vllm_sleep_mode",
    "r": "lora_r",
    "lora_rank": "lora_r",
    "max_lora_rank": "lora_r",
    "random_state": "seed",
    # transformers
    "quantization_config": "quantization",
    # other commands
    "cases": "eval_cases",
    "samples": "eval_samples",
    "greedy": "decoding=greedy",
}
"""Option by foreign name, with its value where the name implies one. Names that only lack our `rl_` are not here."""

_ADVICE = {
    "Aitrain sets it by itself: leave it out.": SET_BY_AITRAIN,
    "Use save_best.": ("metric_for_best_model", "greater_is_better"),
    "The folder model/ is uploaded by aitrain, at the end: use push_to_hub, repo_id and hub_private.": (
        "hub_strategy", "hub_always_push", "hub_revision",
    ),
    "Held-out cases are scored by aitrain: use eval_cases, eval_strategy and eval_steps.": (
        "do_eval", "eval_delay", "eval_on_start", "eval_accumulation_steps", "eval_do_concat_batches",
        "eval_use_gather_object", "batch_eval_metrics", "include_for_metrics", "num_generations_eval",
        "per_device_eval_batch_size", "prediction_loss_only",
    ),
    "Held-out cases are set by eval_cases, or come from the environment's build_eval_dataset.": (
        "valid_split", "eval_dataset_path", "dataset_test_split", "test_split_size",
    ),
    "Aitrain generates one batch at a time with transformers: use use_vllm.": (
        "use_transformers_continuous_batching", "use_transformers_paged", "transformers_continuous_batching_config",
    ),
    "Sampling has rl_temperature, rl_top_k, rl_top_p and rl_stop, which mean the same on every engine.": (
        "generation_kwargs", "min_p", "repetition_penalty",
    ),
    "Aitrain keeps the caches of transformers itself: leave it out.": ("cache_implementation",),
    "GRPO does not use it: leave it out.": (
        "do_train", "do_predict", "label_names", "label_smoothing_factor", "length_column_name",
        "train_sampling_strategy",
    ),
    "Aitrain has a client of its own: use vllm_server_url.": (
        "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
    ),
    "Log-probabilities of constrained completions cannot be compared with the trainer's: score the format.": (
        "vllm_structured_outputs_regex",
    ),
    "Tokens are read from HF_TOKEN, WANDB_API_KEY or the login only: a flag would show them to everyone here.": (
        "hub_token", "token", "wandb_token",
    ),
    "Gradient checkpointing is on where the memory needs it. disable_gradient_checkpointing turns it off.": (
        "gradient_checkpointing", "use_gradient_checkpointing",
    ),
    "The environment builds its dataset: leave it out, or pass it to the environment with rl_env_config.": (
        "data_path", "train_split", "dataset_name", "datasets", "text_column", "prompt_text_column", "column_mapping",
        "max_samples",
    ),
    "Return metrics from the environment: aitrain.Score(score, metrics={...}).": ("eval_metrics", "custom_metrics"),
    "Write fixed and searched options into a file, and use aitrain sweep FILE.": ("use_sweep", "wandb_sweep"),
    "The environment scores the completions: set rl_env.": (
        "rl_reward_fn", "rl_reward_model_path", "rl_reward_weights", "reward_funcs", "reward_model_name_or_path",
    ),
    "Use --trl model_init_kwargs='{revision: VALUE}'.": ("model_revision", "revision"),
    "Use num_processes: each process uses one GPU.": ("device_map",),
    "Checkpoints have no reference model, so that no run could resume exactly: leave it out.": ("sync_ref_model",),
}  # fmt: skip
ADVICE = {name: advice for advice, names in _ADVICE.items() for name in names}
"""What to do about a foreign name that no option corresponds to; any other one is to be left out."""


def same_option(name: str, known: Collection[str]) -> str:
    """The known option that means the same as a foreign name, with its value where the name implies one; empty if there
    is none."""
    options = (SAME_AS.get(name, name), f"rl_{name}")
    return next((option for option in options if option.partition("=")[0] in known), "")


def unknown_option(name: str, known: Collection[str]) -> str:
    """The message for a flag or key that is no option of a job, with the option to use in its place, where one is known
    or near."""
    key = name.lstrip("-").replace("-", "_").lower()
    return f"unknown option {shown(name)}. {_advice(key, known)}".rstrip(" ")


def _advice(key: str, known: Collection[str]) -> str:
    positive, trains = key.removeprefix("no_"), "trl" in known
    if trains and positive in ADVICE:
        return ADVICE[positive]
    if option := same_option(key, known):
        return f"Use {option}."
    if trains and positive in trl_fields():
        return f"Use trl, as in --trl {positive}=VALUE or trl: {{{positive}: VALUE}}."
    return did_you_mean(key, known).strip()
