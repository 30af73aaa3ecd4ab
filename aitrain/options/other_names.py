"""Names of other libraries' options, with the option of ours that means the same, for error messages."""

from __future__ import annotations

from collections.abc import Collection

from aitrain.errors import did_you_mean
from aitrain.options.trl_fields import OPTION_OF_FIELD, SET_BY_AITRAIN, WITHOUT_EFFECT, trl_fields

SAME_AS = {
    **OPTION_OF_FIELD,
    # TRL's ModelConfig, ScriptArguments and generation fields
    "model_name_or_path": "model",
    "use_peft": "peft",
    "lora_target_modules": "target_modules",
    "load_in_4bit": "quantization=int4",
    "bf16": "mixed_precision=bf16",
    "fp16": "mixed_precision=fp16",
    "load_in_8bit": "quantization=int8",
    "torch_dtype": "dtype",
    "hub_model_id": "repo_id",
    "hub_private_repo": "hub_private",
    "load_best_model_at_end": "save_best",
    "early_stopping_patience": "patience",
    "max_tool_calling_iterations": "rl_max_turns",
    "vllm_server_host": "vllm_server_url",
    "vllm_server_port": "vllm_server_url",
    "vllm_max_model_length": "model_max_length",
    # AITraining
    "base_model": "model",
    "use_flash_attention_2": "attn_implementation=flash_attention_2",
    "rl_env_type": "rl_env",
    "sweep_n_trials": "trials",
    "sweep_params": "search",
    "sweep_backend": "sampler",
    "sweep_metric": "objective",
    "sweep_direction": "direction",
    # Optuna
    "n_trials": "trials",
    "custom_loss_weights": "rl_loss_type",
    "chat_format": "chat_template",
    "suggested_chat_template": "chat_template",
    "rl_mini_batch_size": "batch_size",
    "auto_find_batch_size": "batch_size",
    "block_size": "rl_max_prompt_length",
    "optimizer_step_frequency": "gradient_accumulation",
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
    # transformers' generate and vLLM's SamplingParams
    "max_tokens": "rl_max_new_tokens",
    "min_tokens": "rl_min_new_tokens",
    "num_return_sequences": "rl_num_generations",
    "stop_strings": "rl_stop",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
}
"""Option by foreign name, with its value where the name implies one; `rl_` alone may be missing in any case."""

OF_ANOTHER_COMMAND = {
    "eval_cases": "cases",
    "eval_samples": "samples",
    "cases": "eval_cases",
    "samples": "eval_samples",
    "num_samples": "samples",
    "limit": "cases",
    "greedy": "decoding=greedy",
    "batch_size": "concurrency",
    "output_dir": "out",
    "project_name": "out",
}
"""Option by the name that another command of aitrain, or a like tool, has for it."""

_COMMON_ADVICE = {
    "The environment builds its dataset: leave it out, or pass it to the environment with rl_env_config.": (
        "data_path", "train_split", "dataset_name", "datasets", "text_column", "prompt_text_column", "column_mapping",
        "max_samples",
    ),
    "Held-out cases are set by eval_cases, or come from the environment's build_eval_dataset.": (
        "valid_split", "eval_dataset_path", "dataset_test_split", "test_split_size",
    ),
    "Return metrics from the environment: aitrain.Score(score, metrics={...}).": ("eval_metrics", "custom_metrics"),
    "Write fixed and searched options into a file, and use aitrain sweep FILE.": ("use_sweep", "wandb_sweep"),
    "The environment scores the completions: set rl_env.": (
        "rl_reward_fn", "rl_reward_model_path", "rl_reward_weights", "reward_funcs", "reward_model_name_or_path",
    ),
    "Gradient checkpointing is on where the memory needs it. disable_gradient_checkpointing turns it off.": (
        "gradient_checkpointing", "use_gradient_checkpointing",
    ),
    "Use --trl model_init_kwargs='{revision: VALUE}'.": ("model_revision", "revision"),
    "Use --trl num_iterations=VALUE.": ("rl_num_ppo_epochs",),
    "Tokens are read from HF_TOKEN, WANDB_API_KEY or the login only: a flag would show them to everyone here.": (
        "token", "wandb_token",
    ),
    "Options are not nested: write them without an indent.": ("params",),
    "Use dtype bfloat16 with peft.": ("load_in_16bit",),
    "Use num_processes: each process uses one GPU.": ("device_map",),
}  # fmt: skip
ADVICE = {name: advice for advice, names in _COMMON_ADVICE.items() for name in names}
"""What to do about a foreign name that no option corresponds to; any other one is to be left out."""


def unknown_option(name: str, known: Collection[str], where: str = "") -> str:
    """The message for a flag or key that is no option of a job, with the option to use in its place.

    `where` names the file of a key, as in ` (in c.yaml)`.
    """
    shown = name if name.isprintable() and name.strip() else repr(name)
    is_flag = name.startswith("--")
    key = name.lstrip("-").replace("-", "_").lower()
    return f"unknown option {shown[:100]}{where}. {_advice(key, known, is_flag)}".rstrip(" ")


def _advice(key: str, known: Collection[str], is_flag: bool) -> str:
    """What to use in place of a name; empty where nothing is known or near."""
    options = [*([] if key in ADVICE else [SAME_AS.get(key, "")]), OF_ANOTHER_COMMAND.get(key, ""), f"rl_{key}"]
    for option, _, value in (one.partition("=") for one in options):
        if option in known and is_flag:
            return f"Use --{option.replace('_', '-')}{value and ' ' + value}."
        if option in known:
            return f"Use {option}{value and ': ' + value}."
    if "trl" in known:  # a job that trains
        positive = key.removeprefix("no_") if is_flag else key
        if advice := ADVICE.get(positive):
            return advice
        if why := WITHOUT_EFFECT.get(positive):
            return f"{why[0].upper()}{' '.join(why[1:].split())}."
        if positive in SET_BY_AITRAIN:
            return "aitrain sets it by itself: leave it out."
        if positive in trl_fields():
            return f"Use --trl {positive}=VALUE." if is_flag else f"Use trl: {{{positive}: VALUE}}."
    near = did_you_mean(key, known).strip()
    return near.replace("mean ", "mean --").replace("_", "-") if is_flag else near
