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

_TRAINERS = "It belongs to another trainer of AITraining: leave it out."
_SWEEP = "Write fixed and searched options into a file, and use aitrain sweep FILE."
_SAMPLES = "Sample completions are recorded in rollouts/ in any case: leave it out."
_INFERENCE = "aitrain grpo only trains: leave it out."

_COMMON_ADVICE = {
    "The environment builds its dataset: leave it out, or pass it to the environment with rl_env_config.": (
        "data_path", "train_split", "text_column", "prompt_text_column", "rejected_text_column", "image_column",
        "column_mapping", "runtime_mapping", "auto_convert_dataset", "use_sharegpt_mapping",
        "sharegpt_mapping_enabled", "conversation_extension", "map_eos_token", "save_processed_data", "dataset_name",
        "dataset_config", "dataset_train_split", "dataset_streaming", "datasets", "streaming",
    ),
    "Held-out cases are set by eval_cases, or come from the environment's build_eval_dataset.": (
        "valid_split", "use_enhanced_eval", "eval_dataset_path", "eval_benchmark", "dataset_test_split",
        "test_split_size",
    ),
    "Return metrics from the environment: aitrain.Score(score, metrics={...}).": ("eval_metrics", "custom_metrics"),
    "Use rl_loss_type.": ("custom_loss_weights",),
    "Use chat_template.": ("chat_format", "suggested_chat_template"),
    _SWEEP: ("post_trial_script", "use_sweep"),
    "The environment scores the completions: set rl_env.": (
        "rl_reward_fn", "rl_reward_model_path", "rl_reward_weights", "rl_multi_objective", "reward_funcs",
        "reward_model_name_or_path",
    ),
    _TRAINERS: (
        "dpo_beta", "token_weights", "teacher_model", "teacher_prompt_template", "student_prompt_template",
        "use_distillation", "rl_gamma", "rl_gae_lambda", "rl_value_loss_coef", "rl_value_clip_range", "rl_chunk_size",
        "rl_optimize_device_cache", "use_forward_backward", "manual_optimizer_control",
    ),
    "Use save_strategy steps and save_steps.": ("manual_checkpoint_control", "save_state_every_n_steps"),
    _INFERENCE: ("deploy", "inference"),
    "Gradient checkpointing is on where the memory needs it. disable_gradient_checkpointing turns it off.": (
        "gradient_checkpointing", "use_gradient_checkpointing",
    ),
    "Use --trl model_init_kwargs='{revision: VALUE}'.": ("model_revision", "revision"),
    "aitrain does not have this setting of the adapter: leave it out.": (
        "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora", "bias",
        "modules_to_save", "layers_to_transform", "layers_pattern", "init_lora_weights", "loftq_config",
    ),
    "aitrain has quantization int4 and int8 only: leave it out.": (
        "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
    ),
}  # fmt: skip
"""Advice that is the same for several foreign names."""

ADVICE = {name: advice for advice, names in _COMMON_ADVICE.items() for name in names} | {
    # AITraining
    "token": "Tokens are read from HF_TOKEN or the hub login only: a flag would show them to everyone on the machine.",
    "wandb_token": "Tokens are read from WANDB_API_KEY or `wandb login` only.",
    "trainer": "aitrain grpo has one trainer: leave it out.",
    "train": "aitrain grpo always trains: leave it out.",
    "task": "aitrain grpo has one task: leave it out.",
    "params": "Options are not nested: write them without an indent.",
    "backend": "aitrain trains on the machine that it runs on: leave it out.",
    "unsloth": "aitrain trains with TRL as it is: leave it out.",
    "padding": "Prompts are always padded on the left, as generation needs: leave it out.",
    "auto_find_batch_size": "A smaller batch would break the groups: set batch_size.",
    "max_samples": "Use max_steps, or let the environment build a smaller dataset.",
    "eval_batch_size": "Held-out cases are scored in batches of batch_size: leave it out.",
    "eval_save_predictions": "Held-out completions are recorded in rollouts/ in any case: leave it out.",
    "model_ref": "The reference model is the initial model: leave it out.",
    "packing": "GRPO trains on whole completions: leave it out.",
    "block_size": "Use rl_max_prompt_length and rl_max_new_tokens.",
    "add_eos_token": "Completions keep the token that ended them: leave it out.",
    "response_only_loss": "Only tokens that the policy sampled are in the loss: leave it out.",
    "apply_chat_template": "Prompts that are messages get the chat template, texts do not: leave it out.",
    "wandb_visualizer": "Use aitrain view for a run's page.",
    "wandb_run_id": "Use log: wandb and wandb's own environment variables.",
    "rl_num_ppo_epochs": "Use --trl num_iterations=VALUE.",
    "rl_mini_batch_size": "Use batch_size.",
    "optimizer_step_frequency": "Use gradient_accumulation.",
    "grad_clip_value": "Use max_grad_norm.",
    "load_state_from": "Use resume_from_checkpoint.",
    "interactive": "aitrain asks nothing: leave it out.",
    # TRL
    "warmup_steps": "Use warmup_ratio, a share of the steps.",
    "ignore_bias_buffers": "aitrain sets it by itself: leave it out.",
    # Unsloth
    "full_finetuning": "All weights are trained unless peft is given: leave it out.",
    "load_in_16bit": "Use dtype bfloat16 with peft.",
    "device_map": "Each process uses one GPU: leave it out, and set num_processes.",
    "rope_scaling": "Use --trl model_init_kwargs='{rope_scaling: {...}}'.",
    "float8_kv_cache": "aitrain does not have this setting of vLLM: leave it out.",
}
"""What to do about a foreign name that no option corresponds to."""

PREFIXES = {
    "distill_": _TRAINERS,
    "forward_backward_": _TRAINERS,
    "inference_": _INFERENCE,
    "sample_": _SAMPLES,
    "sweep_": _SWEEP,
    "wandb_sweep": _SWEEP,
}
"""The same for groups of names of AITraining."""


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
        by_prefix = next((text for start, text in PREFIXES.items() if positive.startswith(start)), "")
        if advice := ADVICE.get(positive) or by_prefix:
            return advice
        if why := WITHOUT_EFFECT.get(positive):
            return f"{why[0].upper()}{' '.join(why[1:].split())}."
        if positive in SET_BY_AITRAIN:
            return "aitrain sets it by itself: leave it out."
        if positive in trl_fields():
            return f"Use --trl {positive}=VALUE." if is_flag else f"Use trl: {{{positive}: VALUE}}."
    near = did_you_mean(key, known).strip()
    return near.replace("mean ", "mean --").replace("_", "-") if is_flag else near
