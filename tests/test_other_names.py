"""Names that are no options: those of other libraries, misspelt ones, and those that nothing is near."""

from __future__ import annotations

import pytest

from aitrain import TrainConfig
from aitrain.options.other_names import trl_fields, unknown_option

OPTIONS = TrainConfig.model_fields


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("beta", "Use rl_kl_coef."),
        ("max_turns", "Use rl_max_turns."),  # ours, without what it begins with
        ("load_in_8bit", "Use quantization=int8."),
        ("adam_beta1", "Use trl, as in --trl adam_beta1=VALUE or trl: {adam_beta1: VALUE}."),
        ("rl_temprature", "Did you mean rl_temperature?"),
        *((name, ".") for name in ("foo", "num_workers", "é")),
    ],
)
def test_a_name_of_another_library_or_a_misspelt_one_is_answered_with_the_option_and_others_with_none(
    name: str, advice: str
) -> None:
    for given in (name, "--" + name.replace("_", "-")):
        assert unknown_option(given, OPTIONS) == f"unknown option {given}. {advice}".replace(". .", ".")
    assert "Use" not in unknown_option(name, ["json", "limit"])


_AITRAINING = """
    model project_name data_path train_split valid_split max_samples add_eos_token block_size model_max_length padding
    trainer use_flash_attention_2 attn_implementation packing log disable_gradient_checkpointing logging_steps
    eval_strategy save_strategy save_steps save_total_limit auto_find_batch_size mixed_precision lr epochs batch_size
    warmup_ratio gradient_accumulation optimizer scheduler weight_decay max_grad_norm seed chat_template
    response_only_loss quantization target_modules merge_adapter peft lora_r lora_alpha lora_dropout model_ref dpo_beta
    max_prompt_length max_completion_length prompt_text_column text_column rejected_text_column image_column
    auto_convert_dataset use_sharegpt_mapping sharegpt_mapping_enabled suggested_chat_template column_mapping
    runtime_mapping map_eos_token conversation_extension apply_chat_template save_processed_data push_to_hub username
    token repo_id unsloth distributed_backend resume_from_checkpoint use_distillation teacher_model
    teacher_prompt_template student_prompt_template distill_temperature distill_alpha distill_max_teacher_length
    use_sweep sweep_backend sweep_n_trials sweep_metric sweep_direction sweep_params post_trial_script wandb_sweep
    wandb_sweep_project wandb_sweep_entity wandb_sweep_id wandb_run_id wandb_token wandb_visualizer use_enhanced_eval
    eval_metrics eval_dataset_path eval_batch_size eval_save_predictions eval_benchmark chat_format token_weights
    rl_gamma rl_gae_lambda rl_kl_coef rl_value_loss_coef rl_clip_range rl_reward_fn rl_multi_objective
    rl_reward_weights rl_env_type rl_env_config rl_reward_model_path rl_num_ppo_epochs rl_chunk_size
    rl_mini_batch_size rl_optimize_device_cache rl_value_clip_range rl_max_new_tokens rl_top_k rl_top_p
    rl_temperature rl_env_module rl_env_class rl_num_generations rl_loss_type rl_mask_truncated_completions use_vllm
    vllm_mode vllm_gpu_memory_utilization vllm_server_url vllm_tensor_parallel_size vllm_server_gpus ddp_timeout
    custom_loss custom_loss_weights custom_metrics use_forward_backward forward_backward_loss_fn
    forward_backward_custom_fn gradient_accumulation_steps manual_optimizer_control optimizer_step_frequency
    grad_clip_value sample_every_n_steps sample_prompts sample_temperature sample_top_k sample_top_p
    manual_checkpoint_control save_state_every_n_steps load_state_from inference_prompts inference_max_tokens
    inference_temperature inference_top_p inference_top_k inference_output train deploy inference interactive backend
    base_model task params hub_private
"""
"""The parameters of AITraining 0.0.54, and the flags and YAML keys beside them."""
_UNSLOTH = """
    model_name max_seq_length dtype load_in_4bit load_in_8bit load_in_16bit full_finetuning token device_map
    rope_scaling trust_remote_code use_gradient_checkpointing revision fast_inference gpu_memory_utilization
    float8_kv_cache random_state max_lora_rank unsloth_vllm_standby r target_modules lora_alpha lora_dropout bias
    layers_to_transform layers_pattern use_rslora modules_to_save init_lora_weights loftq_config
"""
"""The parameters of Unsloth's FastLanguageModel.from_pretrained and get_peft_model."""


@pytest.mark.slow
def test_no_name_of_trl_aitraining_and_unsloth_is_taken_for_a_misspelt_option() -> None:
    for name in {*trl_fields(), *_AITRAINING.split(), *_UNSLOTH.split()} - {*OPTIONS}:
        for given in (name, "--" + name.replace("_", "-")):
            _, _, advice = unknown_option(given, OPTIONS).partition(". ")
            assert not advice.startswith("Did you mean"), name
            assert advice or name not in trl_fields(), name
