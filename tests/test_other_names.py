"""Names that are no options: those of other libraries, misspelt ones, and those that nothing is near."""

from __future__ import annotations

import ast
import random
import string
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from aitrain import ConfigError, TrainConfig
from aitrain.cli.main import app, main
from aitrain.errors import did_you_mean
from aitrain.options.other_names import ADVICE, PREFIXES, SAME_AS, unknown_option
from aitrain.options.reading import resolve
from aitrain.options.sweep import SweepConfig
from tests.conftest import Run, write

OPTIONS = TrainConfig.model_fields

SAME = {
    # TRL and transformers
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "num_train_epochs": "epochs",
    "num_generations": "rl_num_generations",
    "max_completion_length": "rl_max_new_tokens",
    "max_prompt_length": "rl_max_prompt_length",
    "beta": "rl_kl_coef",
    "epsilon": "rl_clip_range",
    "temperature": "rl_temperature",
    "top_k": "rl_top_k",
    "loss_type": "rl_loss_type",
    "use_peft": "peft",
    "lora_target_modules": "target_modules",
    "model_name_or_path": "model",
    "report_to": "log",
    "run_name": "project_name",
    "optim": "optimizer",
    "lr_scheduler_type": "scheduler",
    "load_best_model_at_end": "save_best",
    "early_stopping_patience": "patience",
    # AITraining
    "base_model": "model",
    # Unsloth
    "model_name": "model",
    "max_seq_length": "model_max_length",
    "fast_inference": "use_vllm",
    "max_lora_rank": "lora_r",
    "r": "lora_r",
    "random_state": "seed",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    # ours, without what it begins with
    "max_turns": "rl_max_turns",
    "score_range": "rl_score_range",
}


@pytest.mark.parametrize(("name", "option"), SAME.items())
def test_a_name_of_another_library_is_recognised_in_python_and_as_a_flag(name: str, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{name: 1})

    assert str(caught.value) == f"unknown option {name}. Use {option}."
    flag = "--" + name.replace("_", "-")
    assert unknown_option(flag, OPTIONS) == f"unknown option {flag}. Use --{option.replace('_', '-')}."


def test_a_name_of_another_library_is_recognised_on_the_command_line_and_in_a_file(
    aitrain_grpo: Run, here: Path
) -> None:
    done = aitrain_grpo("--learning-rate", "1e-5")
    assert done.stderr.splitlines()[0] == "aitrain: unknown option --learning-rate. Use --lr."
    assert done.returncode == 2

    write(here, {"c.yaml": "learning_rate: 1e-5\n"})
    with pytest.raises(ConfigError, match=r"^unknown option learning_rate \(in c\.yaml\)\. Use lr\.$"):
        resolve(TrainConfig, Path("c.yaml"))


def test_a_name_that_implies_a_value_is_answered_with_option_and_value() -> None:
    assert unknown_option("--load-in-4bit", OPTIONS).endswith("Use --quantization int4.")
    assert unknown_option("--bf16", OPTIONS).endswith("Use --mixed-precision bf16.")
    assert unknown_option("load_in_8bit", OPTIONS).endswith("Use quantization: int8.")
    assert unknown_option("--use_flash_attention_2", OPTIONS).endswith("--attn-implementation flash_attention_2.")


def test_a_field_of_grpo_config_without_an_option_is_answered_with_trl() -> None:
    assert unknown_option("--num-iterations", OPTIONS).endswith("Use --trl num_iterations=VALUE.")
    assert unknown_option("adam_beta1", OPTIONS).endswith("Use trl: {adam_beta1: VALUE}.")
    assert "--rl-min-p" in unknown_option("--generation-kwargs", OPTIONS)


def fields_of(module: str, *classes: str) -> set[str]:
    """The fields of dataclasses of a library, read from its source."""
    spec = find_spec(module.partition(".")[0])
    assert spec is not None
    file = Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")  # type: ignore[index]
    nodes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    bodies = [item for node in nodes if node.name in classes for item in node.body]
    return {item.target.id for item in bodies if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}


TRL_NAMES = (
    fields_of("trl.trainer.grpo_config", "GRPOConfig")
    | fields_of("trl.trainer.model_config", "ModelConfig")
    | fields_of("trl.scripts.utils", "ScriptArguments", "DatasetMixtureConfig")
    | fields_of("trl.scripts.grpo", "GRPOScriptArguments")
    | fields_of("transformers.training_args", "TrainingArguments")
)
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


@pytest.mark.parametrize("name", sorted({*TRL_NAMES, *_AITRAINING.split(), *_UNSLOTH.split()} - {*OPTIONS}))
@pytest.mark.slow
def test_every_name_of_trl_aitraining_and_unsloth_is_an_option_or_gets_advice(name: str) -> None:
    for given in (name, "--" + name.replace("_", "-")):
        _, _, advice = unknown_option(given, OPTIONS).partition(". ")
        assert advice.endswith(".")
        assert not advice.startswith("Did you mean")


def test_advice_names_options_that_exist() -> None:
    assert {text.partition("=")[0] for text in SAME_AS.values()} <= {*OPTIONS, *SweepConfig.model_fields}
    words = [word for text in (*ADVICE.values(), *PREFIXES.values()) for word in text.split()]
    flags = {word.rstrip(".,:;").replace("-", "_").lstrip("_") for word in words if word.startswith("--")}
    assert flags <= set(OPTIONS)


def test_advice_is_never_about_an_option() -> None:
    assert not {*ADVICE, *SAME_AS} & set(OPTIONS) - set(SAME_AS.values())
    assert not set(ADVICE) & set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "option"),
    [("rl_temprature", "rl_temperature"), ("batchsize", "batch_size"), ("epoch", "epochs"),
    
     ("wamrup_ratio", "warmup_ratio"), ("lora_aplha", "lora_alpha"), ("rl_num_generation", "rl_num_generations"),
     ("LR", "lr"), ("modle", "model"),
     ("rl-top-p", "rl_top_p"), ("vllm_servr_url", "vllm_server_url"), ("max_step", "max_steps")],
)  # fmt: skip
def test_a_misspelt_name_is_answered_with_the_nearest_option(name: str, option: str) -> None:
    assert unknown_option(name, OPTIONS).endswith(f" Did you mean {option}?")
    flag = "--" + name.replace("_", "-")
    assert unknown_option(flag, OPTIONS).endswith(f" Did you mean --{option.replace('_', '-')}?")


FAR_AWAY = (
    "reward_scale", "warp_drive", "foo", "bar", "verbosity", "max_tokens_per_second", "num_workers", "cuda", "gpus",
    "moe_experts", "think", "actor_lr_factor", "rollout_n", "kl_target", "entropy_bonus", "critic", "x", "ab", "é",
)  # fmt: skip


@pytest.mark.parametrize("name", FAR_AWAY)
def test_nothing_is_suggested_for_a_name_that_is_near_to_none(name: str) -> None:
    assert unknown_option(name, OPTIONS) == f"unknown option {name}."


@pytest.mark.slow
def test_nothing_is_suggested_for_random_names() -> None:
    letters = random.Random(0)
    for _ in range(2000):
        name = "".join(letters.choices(string.ascii_lowercase + "_", k=letters.randint(8, 24)))
        assert did_you_mean(name, OPTIONS) == "", name


@pytest.mark.parametrize("name", ["\n", "\x1b[31m", " ", "a\tb"])
def test_an_unprintable_name_is_shown_quoted(name: str) -> None:
    assert unknown_option(name, OPTIONS) == f"unknown option {name!r}."


def test_a_very_long_name_is_cut_off() -> None:
    assert len(unknown_option("x" * 10_000, OPTIONS)) < 200


def test_a_command_without_options_of_a_run_has_no_advice_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["json", "limit", "worst"]
    assert unknown_option("--learning-rate", known) == "unknown option --learning-rate."
    assert unknown_option("--worse", known) == "unknown option --worse. Did you mean --worst?"


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("eval tiny --eval-cases 8", "Use --cases."),
        ("eval tiny --eval-samples 8", "Use --samples."),
        ("eval tiny --greedy", "Use --decoding greedy."),
        ("eval --model tiny", "Leave it out, and write only its value: aitrain eval VALUE"),
        ("compare sums --eval_cases 8", "Use --cases."),
        ("grpo --cases 8", "Use --eval-cases."),
        ("grpo --samples 8", "Use --eval-samples."),
        ("plan --samples 8", "Use --eval-samples."),
        ("chat --model sums", "Leave it out, and write only its value: aitrain chat VALUE"),
        ("export sums --output-dir x", "Use --out."),
        ("serve --run sums", "Leave it out, and write only its value: aitrain serve VALUE"),
        ("runs --output-dir x", "Leave it out, and write only its value: aitrain runs VALUE"),
        ("env check --rl-env x.py", "Leave it out, and write only its value: aitrain env check VALUE"),
    ],
)
def test_the_name_that_an_option_has_in_another_command_is_understood(
    command: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["aitrain", *command.split()])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[0].endswith(f". {advice}")


@pytest.mark.parametrize("command", ["play", "rescore"])
def test_options_of_a_run_have_the_same_names_in_the_workbench(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["env", command, "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    names = {"play": ("--rl-max-turns", "--rl-max-new-tokens"), "rescore": ("--rl-env", "--limit")}
    assert all(name in shown for name in names[command])


def test_the_advice_about_trl_is_valid_yaml() -> None:
    values: Any = yaml.safe_load("trl: {adam_beta1: VALUE}")
    assert values == {"trl": {"adam_beta1": "VALUE"}}
