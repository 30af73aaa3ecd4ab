"""Options: their defaults, where their values come from, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aitrain
from aitrain import ConfigError, TrainConfig
from aitrain.options.reading import read_file, resolve
from tests.conftest import case_name, write

AITRAINING = {
    "rl_num_generations": 4, "rl_kl_coef": 0.1, "rl_max_new_tokens": 128,
    "rl_top_p": 1.0, "rl_temperature": 1.0, "rl_loss_type": "grpo", "rl_mask_truncated_completions": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1, "vllm_server_gpus": 1,
    "model": "google/gemma-3-270m", "project_name": "project-name", "gradient_accumulation": 4,
    "epochs": 1, "warmup_ratio": 0.1, "optimizer": "adamw_torch", "scheduler": "linear", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "logging_steps": -1, "save_strategy": "epoch", "save_steps": 500, "save_total_limit": 1,
    "eval_strategy": "epoch", "ddp_timeout": 7200, "lora_r": 16, "lora_alpha": 32, "target_modules": "all-linear",
    "merge_adapter": True, "hub_private": True,
}  # fmt: skip
DIFFERENT = {
    "rl_top_k": 0, "log": "none", "lora_dropout": 0.0, "trust_remote_code": False,
}  # fmt: skip


def test_the_defaults_are_those_that_aitraining_has_but_for_a_few() -> None:
    expected = {**AITRAINING, **DIFFERENT}
    assert {name: getattr(TrainConfig(), name) for name in expected} == expected


# -- where values come from


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("lr: 0.5\nbatch_size: 8\n", {"batch_size": "16"}, {"lr": 0.5, "batch_size": 16, "epochs": 1}),
        (
            "trl: {min_p: 0.1, logit_dtype: none}",
            {"trl": ["min_p=0.2", "num_iterations=2", "sapo_temperature_pos=1e-1"]},
            {"trl": {"min_p": 0.2, "logit_dtype": "none", "num_iterations": 2, "sapo_temperature_pos": 0.1}},
        ),
        # a flag wins over the other way to say it
        ("rl_prompts_per_step: 8", {"gradient_accumulation": "2"},
         {"rl_prompts_per_step": None, "gradient_accumulation": 2}),
        ("rl_preset: dapo\nrl_kl_coef: 0.02\nrl_num_generations: 16", {"rl_preset": "gspo"},
         {"rl_kl_coef": 0, "rl_sampling": "uniform", "rl_num_generations": 16}),
        ("gradient_accumulation: 2\nrl_num_generations: 16", {"rl_preset": "recommended"},
         {"rl_prompts_per_step": 16, "rl_num_generations": 8}),
        ("rl_env_module: a.b\nrl_env_class: C", {"rl_env": "x.py:Y"}, {"rl_env_module": None, "rl_env_class": None}),
        # YAML is read as it was meant
        ("rl_env_config: {small: 1e-6, big: 2E5, signed: -1e+3, day: 2024-11-20}", {},
         {"rl_env_config": {"small": 1e-6, "big": 2e5, "signed": -1000.0, "day": "2024-11-20"}}),
        ("eval_strategy: no\nsave_strategy: off", {}, {"eval_strategy": "no", "save_strategy": "no"}),
        ("save_total_limit: null\nmax_steps: ~\nrl_env_config:\ntrl:", {},
         {"save_total_limit": None, "max_steps": None, "rl_env_config": {}, "trl": {}}),
    ],
)  # fmt: skip
def test_a_value_comes_from_a_flag_else_the_file_else_the_default(
    file: str, flags: dict[str, Any], expected: dict[str, Any], here: Path
) -> None:
    write(here, {"c.yaml": file})

    config = resolve(TrainConfig, Path("c.yaml"), flags)

    assert {name: getattr(config, name) for name in expected} == expected


# -- values that come in several forms


def test_the_configuration_of_an_environment_is_an_object_or_a_text(here: Path) -> None:
    write(here, {"c.yaml": "rl_env_config: {city: Rome}"})

    given = [{"city": "Rome"}, '{"city": "Rome"}', read_file(Path("c.yaml"))["rl_env_config"]]

    assert [TrainConfig(rl_env_config=value).rl_env_config for value in given] == [{"city": "Rome"}] * 3


SERVED = {"use_vllm": True, "vllm_mode": "server"}
SHARDED = {"distributed_backend": "fsdp2"}


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("model", Path("models") / "mine", str(Path("models/mine"))),
        ("rl_stop", "</a>", ["</a>"]),
        ("vllm_server_url", "http://a:1/v1, https://b:2", "http://a:1,https://b:2"),
        ("vllm_server_url", ["http://a:1", "https://b:2/"], "http://a:1,https://b:2"),
    ],
)
def test_a_value_comes_in_several_forms(name: str, given: Any, taken: Any) -> None:
    assert getattr(TrainConfig(**SERVED, **{name: given}), name) == taken


# -- wrong values


def test_options_are_given_to_train_by_name_or_as_one_config() -> None:
    with pytest.raises(ConfigError, match="Use lr"):
        aitrain.train(learning_rate=1)
    for config, options in (({"model": "tiny"}, {}), ("tiny", {}), (TrainConfig(), {"lr": 1})):
        with pytest.raises(ConfigError, match="config"):
            aitrain.train(config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rl_num_generations": 1}, "greater than or equal to 2"),
        ({"rl_num_generation": 4}, "unknown option rl_num_generation. Did you mean rl_num_generations?"),
        ({"self": 1}, "unknown option self"),
        ({"lr": "-1"}, "lr: must be greater than 0, not -1"),
        ({"max_steps": "9" * 5000}, "max_steps: must be smaller, not 999"),
        ({"vllm_mode": "servr"}, "must be 'colocate' or 'server', not servr"),
        ({"project_name": "a/b"}, "output_dir"),
        ({"rl_env_config": "{'a': 1}"}, "single quotes"),
        *(({"rl_env_config": value}, "must be a table like") for value in ([], 0, "[1]")),
        ({"rl_env": "a.py", "rl_env_module": "b"}, "both name an environment"),
        ({"rl_env_class": "A"}, "a class of rl_env_module"),
        ({"rl_stop": [""]}, "rl_stop: must have at least 1 character, not ''"),
        ({"target_modules": []}, "target_modules: must have at least 1 character"),
        ({"output_dir": " "}, "output_dir: must not be blank"),
        ({"rl_stop": '["a", "b"]'}, "Repeat the flag: --rl-stop A --rl-stop B"),
        ({"vllm_server_url": "http://x:1"}, "vllm_mode server"),
        ({**SERVED, "vllm_server_url": "x:1"}, "addresses like http://"),
        ({"rl_ahead": 1, "use_vllm": True}, "rl_ahead: needs a vLLM server"),
        ({"patience": 2, "eval_strategy": "no"}, "patience: nothing is scored during the training"),
        ({"log": "tensorbord"}, "not tensorbord\nTrackers to report to"),
        *(({"rl_score_range": value}, "rl_score_range: must be LOW,HIGH") for value in ("1,0", "0,1,2", "0,inf")),
        # loss types
        (
            {"rl_loss_type": "cispo", "rl_clip_range_high": 0.28},
            "rl_clip_range_high: for cispo it is the largest ratio",
        ),
        ({"custom_loss": "a:b", "trl": {"top_entropy_quantile": 0.2}}, "custom_loss: trl top_entropy_quantile"),
        # several environments
        ({"rl_env": ["a=x.py", "y.py"]}, "as in NAME=y.py"),
        ({"rl_env": ["a=x.py", "b=x.py"], "rl_env_weights": "1,2,3"}, "3 weights for 2 environments"),
        ({"rl_env": ["a=x.py", "easy=x.py"], "rl_env_config": {"eazy": {}}}, "Did you mean easy?"),
        # sharding
        ({**SHARDED, "optimizer": "adafactor"}, "optimizer: the state of adafactor"),
        ({**SHARDED, "quantization": "int4", "peft": True}, "quantization: quantized weights"),
        # Ray
        ({"launcher": "ray"}, "add num_processes"),
        ({"launcher": "ray", "num_processes": 2, **SERVED}, "vllm_mode: with launcher ray"),
        *(({"rl_env_workers": value}, "rl_env_workers: ") for value in ("ray:0", "ray", "0", -1, True)),
    ],
    ids=case_name,
)
def test_wrong_values_and_options_that_contradict_each_other_are_refused_with_what_they_must_be(
    wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**wrong)

    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("none.yaml", "", "there is no file none.yaml"),
        ("c.yaml", "- lr", "one option a line"),
        ("c.yaml", "lr: 1\nlr: 2", "c.yaml: duplicate key lr, line 2"),
        ("c.yaml", b"\x00\xff\xfe", "can't decode byte"),
        ("c.yaml", "trl: &x {a: 1}\nrl_env_config: *x", "c.yaml: it has aliases"),
    ],
    ids=case_name,
)
def test_a_file_of_options_that_cannot_be_read_is_refused_with_its_name(
    file: str, content: str | bytes, told: str, here: Path
) -> None:
    write(here, {"c.yaml": content})

    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig, Path(file))
    assert told in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sync", "may"),
    [
        ({"peft": True}, None, True),
        ({"peft": True, "use_vllm": True}, None, False),
        ({**SERVED, "peft": True}, "adapter", True),
        (SERVED, "disk", False),
    ],
    ids=str,
)
def test_a_base_in_half_precision_is_one_that_no_update_is_added_to(
    options: dict[str, Any], sync: Any, may: bool
) -> None:
    config = TrainConfig(**options)
    assert (config.weight_sync, config.may_halve_base) == (sync, may)
