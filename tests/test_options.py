"""Options: their defaults, where their values come from, and what is said about wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.options.documentation import help_text
from aitrain.options.option import options_of
from aitrain.options.other_names import ADVICE
from aitrain.options.reading import read_file, resolve
from aitrain.options.yaml_text import read_yaml, write_yaml
from aitrain.runs.run_folder import RunFolder
from tests.conftest import case_name, write

AITRAINING = {
    "rl_num_generations": 4, "rl_kl_coef": 0.1, "rl_max_new_tokens": 128,
    "rl_top_p": 1.0, "rl_temperature": 1.0, "rl_loss_type": "grpo", "rl_mask_truncated_completions": False,
    "rl_env_module": None, "rl_env_class": None, "rl_env_config": None,
    "use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": None, "vllm_server_url": None,
    "vllm_tensor_parallel_size": 1, "vllm_server_gpus": 1,
    "model": "google/gemma-3-270m", "project_name": "project-name", "gradient_accumulation": 4,
    "epochs": 1, "warmup_ratio": 0.1, "optimizer": "adamw_torch", "scheduler": "linear", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "logging_steps": -1, "save_strategy": "epoch", "save_steps": 500, "save_total_limit": 1,
    "eval_strategy": "epoch", "mixed_precision": None, "disable_gradient_checkpointing": False,
    "attn_implementation": None, "resume_from_checkpoint": None, "ddp_timeout": 7200,
    "peft": False, "lora_r": 16, "lora_alpha": 32, "target_modules": "all-linear", "merge_adapter": True,
    "quantization": None, "chat_template": None, "push_to_hub": False, "username": None, "repo_id": None,
    "hub_private": True,
}  # fmt: skip
DIFFERENT = {
    "lr": None,
    "batch_size": None,
    "rl_top_k": 0,
    "log": "none",
    "lora_dropout": 0.0,
    "trust_remote_code": False,
    "model_max_length": None,
}


@pytest.mark.parametrize(("name", "default"), AITRAINING.items())
def test_a_default_is_the_one_that_aitraining_has(name: str, default: Any) -> None:
    assert getattr(TrainConfig(), name) == default


@pytest.mark.parametrize(("name", "default"), DIFFERENT.items())
def test_a_default_that_differs_from_aitraining_says_why(name: str, default: Any) -> None:
    (option,) = [option for option in options_of(TrainConfig) if option.name == name]
    assert getattr(TrainConfig(), name) == default
    assert "AITraining" in option.description or default is None


def test_every_option_has_a_description_a_section_and_a_line_in_the_help() -> None:
    for option in options_of(TrainConfig):
        assert option.description.endswith(".")
        assert option.section
        assert f"  {option.flag}" in help_text(TrainConfig)


def test_stop_strings_are_one_text_or_a_list() -> None:
    assert TrainConfig(rl_stop="</a>").rl_stop == TrainConfig(rl_stop=["</a>"]).rl_stop == ["</a>"]
    assert TrainConfig(rl_stop='["</a>", "\\n"]').rl_stop == ["</a>", "\n"]
    assert TrainConfig(rl_stop="[").rl_stop == ["["]
    for wrong in ([], [""], 5, [1]):
        with pytest.raises(ConfigError, match="rl_stop: must be a text, or a list of texts that are not empty"):
            TrainConfig(rl_stop=wrong)


def test_what_a_vllm_server_cannot_do_is_refused() -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    TrainConfig(use_vllm=True, rl_stop=list("abcde"))
    with pytest.raises(ConfigError, match="rl_stop: a vLLM server takes at most 4 texts, not 5"):
        TrainConfig(**server, rl_stop=list("abcde"))
    with pytest.raises(ConfigError, match=r"--rl-presence-penalty 0\.5: cannot be used with --vllm-sync nccl"):
        TrainConfig.read(
            {**server, "vllm_server_url": "http://127.0.0.1:1", "vllm_sync": "nccl", "rl_presence_penalty": 0.5}
        )


# -- where values come from


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(here: Path) -> None:
    write(here, {"c.yaml": "lr: 0.5\nbatch_size: 8\n"})

    config = resolve(TrainConfig, Path("c.yaml"), {"batch_size": "16"})

    assert (config.lr, config.batch_size, config.epochs) == (0.5, 16, 1)


def test_fields_for_trl_from_the_file_and_from_flags_are_put_together(here: Path) -> None:
    write(here, {"c.yaml": "trl: {min_p: 0.1, scale_rewards: none}\n"})

    config = resolve(
        TrainConfig,
        Path("c.yaml"),
        {"trl": ["min_p=0.2", "num_iterations=2", "delta=1e-1", "top_entropy_quantile=0.5"]},
    )

    assert config.trl == {
        "min_p": 0.2, "scale_rewards": "none", "num_iterations": 2, "delta": 0.1, "top_entropy_quantile": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("1e-6", 1e-6), ("true", True), ("null", None), ("none", "none"), ("[1, 2]", [1, 2]), ("[1", "[1"),
     ("a=b", "a=b"), ("", None)],
)  # fmt: skip
def test_a_value_for_trl_is_what_it_looks_like(text: str, value: Any) -> None:
    assert resolve(TrainConfig, None, {"trl": [f"key={text}"]}).trl == {"key": value}


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("gradient_accumulation: 4", {"rl_prompts_per_step": "8"}, {"rl_prompts_per_step": 8}),
        ("rl_prompts_per_step: 8", {"gradient_accumulation": "2"},
         {"rl_prompts_per_step": None, "gradient_accumulation": 2}),
        ("rl_env_module: a.b\nrl_env_class: C", {"rl_env": "x.py:Y"}, {"rl_env_module": None, "rl_env_class": None}),
        ("rl_env: x.py:Y", {"rl_env_module": "a.b"}, {"rl_env": None, "rl_env_module": "a.b"}),
        ("rl_env: x.py", {"rl_env_class": "Z"}, {"rl_env": "x.py", "rl_env_class": "Z"}),
    ],
)  # fmt: skip
def test_a_flag_wins_over_the_other_way_to_say_it_in_the_file(
    here: Path, file: str, flags: dict[str, str], expected: dict[str, Any]
) -> None:
    write(here, {"c.yaml": file})

    config = resolve(TrainConfig, Path("c.yaml"), flags)

    assert {name: getattr(config, name) for name in expected} == expected


def test_the_written_configuration_reads_back_as_the_same_one(here: Path) -> None:
    odd = {"date": "2024-11-20", "number": "1e-6", "no": "no", "off": False, "null": None, "list": [1, 2.5, "é\n:#"]}
    config = TrainConfig(
        rl_env="x.py", rl_env_config=odd, lr="3e-6", project_name="1e5", save_total_limit=None, eval_strategy="no",
        trl={"min_p": 1e-7, "generation_kwargs": {"x": "on"}}, model="y", target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    folder = RunFolder.create(config)
    folder.write_config(config)

    again = TrainConfig(**read_file(TrainConfig, folder.config))

    assert again.model_dump() == config.model_dump()


def test_the_written_configuration_of_derived_numbers_can_be_run_with_other_ones(here: Path) -> None:
    config = TrainConfig(rl_env="x.py", rl_prompts_per_step=8)
    folder = RunFolder.create(config)
    folder.write_config(config)

    assert resolve(TrainConfig, folder.config, {"rl_prompts_per_step": "4"}).rl_prompts_per_step == 4
    assert "gradient_accumulation" not in read_file(TrainConfig, folder.config)


# -- values that come in several forms


def test_the_configuration_of_an_environment_is_an_object_a_text_or_a_file(here: Path) -> None:
    write(here, {"e.json": b'\xef\xbb\xbf{"city": "Rome"}', "c.yaml": "rl_env_config: {city: Rome}"})

    given = [{"city": "Rome"}, '{"city": "Rome"}', "@e.json", read_file(TrainConfig, Path("c.yaml"))["rl_env_config"]]

    assert [TrainConfig(rl_env_config=value).rl_env_config for value in given] == [{"city": "Rome"}] * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: 1e-6", {"lr": 1e-6}),
        ("rl_env_config: {small: 1e-6, big: 2E5, signed: -1e+3}",
         {"rl_env_config": {"small": 1e-6, "big": 2e5, "signed": -1000.0}}),
        ("rl_env_config: {day: 2024-11-20}", {"rl_env_config": {"day": "2024-11-20"}}),
        ("eval_strategy: no\nsave_strategy: off\nmixed_precision: no",
         {"eval_strategy": "no", "save_strategy": "no", "mixed_precision": "no"}),
        ("peft: yes\nuse_vllm: off", {"peft": True, "use_vllm": False}),
        ("save_total_limit: null\nmax_steps: ~\nrl_env_config:\ntrl:",
         {"save_total_limit": None, "max_steps": None, "rl_env_config": None, "trl": {}}),
        ("target_modules: [q_proj, v_proj]", {"target_modules": "q_proj,v_proj"}),
        ("project_name: 2024-11-20", {"project_name": "2024-11-20"}),
    ],
)  # fmt: skip
def test_yaml_is_read_as_it_was_meant(here: Path, text: str, expected: dict[str, Any]) -> None:
    write(here, {"c.yaml": text})

    config = resolve(TrainConfig, Path("c.yaml"))

    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "value", ["1e5", "1e-6", "no", "2024-11-20", "12", "", "a: b", "#", "é", "x\ny", "~", "=", "1_0"]
)
def test_text_stays_text_in_yaml(value: str) -> None:
    assert read_yaml(write_yaml({"key": value})) == {"key": value}


def test_python_may_give_a_path_where_a_name_is_wanted() -> None:
    assert TrainConfig(model=Path("models") / "mine").model == str(Path("models/mine"))  # type: ignore[arg-type]


def test_a_server_address_may_end_as_openai_clients_have_it() -> None:
    config = TrainConfig(use_vllm=True, vllm_mode="server", vllm_server_url="http://localhost:8000/v1/")

    assert config.vllm_server_url == "http://localhost:8000"


@pytest.mark.parametrize("given", ["http://a:1/v1, https://b:2", ["http://a:1", "https://b:2/"]])
def test_several_servers_are_given_with_commas_or_as_a_list(given: Any) -> None:
    config = TrainConfig(use_vllm=True, vllm_mode="server", vllm_server_url=given)

    assert config.vllm_server_urls == ["http://a:1", "https://b:2"]
    assert config.written()["vllm_server_url"] == "http://a:1,https://b:2"


# -- wrong values

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"rl_num_generations": 1}, ["rl_num_generations: must be at least 2, not 1", "Completions per prompt"]),
    ({"lr": "-1"}, ["lr: must be above 0, not -1"]),
    ({"lr": "nan"}, ["lr: must be a finite number, not nan"]),
    ({"rl_kl_coef": None}, ["rl_kl_coef: must be a number, not null"]),
    ({"lr": True}, ["lr: must be a number, not true"]),
    ({"rl_top_p": 1.5}, ["rl_top_p: must be at most 1, not 1.5"]),
    ({"seed": 2**32}, ["seed: must be below 4294967296"]),
    ({"seed": -1}, ["seed: must be at least 0, not -1"]),
    ({"batch_size": "two"}, ["batch_size: must be a whole number, not two"]),
    ({"batch_size": 2.5}, ["batch_size: must be a whole number, not 2.5"]),
    ({"batch_size": True}, ["batch_size: must be a whole number, not true"]),
    ({"save_total_limit": 0}, ["save_total_limit: must be at least 1, not 0"]),
    ({"logging_steps": 0}, ["logging_steps: give 1 or more, or -1"]),
    ({"vllm_mode": "servr"}, ["vllm_mode: must be 'colocate' or 'server', not servr. Did you mean server?"]),
    ({"eval_strategy": True}, ["eval_strategy: must be 'no', 'steps', 'epoch', not true"]),
    ({"peft": "maybe"}, ["peft: must be true or false, not maybe"]),
    ({"model": " "}, ["model: must not be empty"]),
    ({"model": "a\nb\n"}, ["model: must be one line of plain text, not 'a\\nb\\n'"]),
    ({"output_dir": "a\0b"}, ["output_dir: must be one line of plain text"]),
    ({"rl_env_config": True}, ["rl_env_config: must be a table, not true"]),
    ({"project_name": 12}, ["project_name: must be text", "not 12"]),
    ({"project_name": "a/b"}, ["project_name: 'a/b' is not a folder name", "--output-dir"]),
    ({"project_name": ".."}, ["project_name: '..' is not a folder name"]),
    ({"rl_env_config": [1]}, ["rl_env_config: must be a JSON object like", "not a list"]),
    ({"rl_env_config": "null"}, ["rl_env_config: must be a JSON object like", "not null"]),
    ({"rl_env_config": "{'a': 1}"}, ["rl_env_config: is not valid JSON", "single quotes"]),
    ({"rl_env_config": "@missing.json"}, ["rl_env_config: names a file that cannot be read: missing.json: No such"]),
    ({"rl_env_config": {1: 2}}, ["rl_env_config: its keys must be text"]),
    ({"rl_env_config": {"a": object()}}, ["rl_env_config: must hold only what JSON can hold"]),
    ({"trl": [1]}, ["trl: must be a table", "not a list"]),
    ({"rl_temprature": 1}, ["unknown option rl_temprature. Did you mean rl_temperature?"]),
    ({"rl_env": "a.py", "rl_env_module": "b"}, ["rl_env and rl_env_module both name an environment"]),
    ({"rl_env": "a.py:A", "rl_env_class": "B"}, ["name two classes"]),
    ({"rl_env_class": "A"}, ["rl_env_class: the module of A is missing: add --rl-env-module"]),
    ({"vllm_server_url": "http://x:1"}, ["vllm_server_url", "--use-vllm", "--vllm-mode server"]),
    ({"vllm_server_url": "x:1", "use_vllm": True, "vllm_mode": "server"},
     ["vllm_server_url: must be an address like http://127.0.0.1:8000, not x:1"]),
    ({"vllm_server_url": "http://x:1,http://x:1/", "use_vllm": True, "vllm_mode": "server"},
     ["vllm_server_url: has http://x:1 twice"]),
    ({"vllm_server_url": "http://x:1,http://y:1", "use_vllm": True, "vllm_mode": "server", "vllm_sync": "nccl"},
     ["vllm_sync: nccl takes one server"]),
    ({"vllm_servers": 2, "use_vllm": True}, ["vllm_servers: for vLLM servers that aitrain starts only"]),
    ({"vllm_listen_address": "a", "vllm_server_url": "http://x:1", "use_vllm": True, "vllm_mode": "server"},
     ["vllm_listen_address: for vLLM servers that aitrain starts only", "leave --vllm-server-url out"]),
    ({"use_vllm": True, "vllm_mode": "server", "vllm_sync": "adapter"}, ["vllm_sync", "without --peft"]),
    ({"rl_ahead": 1}, ["rl_ahead: needs a vLLM server", "--vllm-mode server"]),
    ({"rl_ahead": 1, "use_vllm": True}, ["rl_ahead: needs a vLLM server"]),
    ({"rl_ahead": 2, "use_vllm": True, "vllm_mode": "server"}, ["rl_ahead: must be at most 1"]),
    ({"rl_ahead_turns": True, "use_vllm": True, "vllm_mode": "server"}, ["rl_ahead_turns: without --rl-ahead 1"]),
    ({"use_vllm": True, "vllm_mode": "server", "vllm_sync": "nccl"}, ["vllm_sync", "--vllm-server-url"]),
    ({"quantization": "int4", "peft": True, "use_vllm": True, "vllm_mode": "server", "vllm_sync": "disk"},
     ["quantization", "only the adapter"]),
    ({"quantization": "int4"}, ["quantization", "--peft"]),
    ({"quantization": "int4", "peft": True, "use_vllm": True}, ["quantization", "leave one of the two out"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[json.dumps(wrong, default=case_name) for wrong, _ in WRONG])
def test_a_wrong_value_is_refused_with_the_options_name_and_what_it_must_be(
    wrong: dict[Any, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.read(wrong)

    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_advice_about_aitrainings_other_flags_is_never_about_an_option() -> None:
    assert not set(ADVICE) & set(TrainConfig.model_fields)


def test_a_quantized_base_may_be_served_when_only_the_adapter_is_handed_over() -> None:
    TrainConfig(quantization="int4", peft=True, use_vllm=True, vllm_mode="server")


@pytest.mark.parametrize(
    ("options", "sync", "may"),
    [({}, None, False), ({"peft": True}, None, True), ({"peft": True, "use_vllm": True}, None, False),
     ({"peft": True, "use_vllm": True, "vllm_mode": "server"}, "adapter", True),
     ({"use_vllm": True, "vllm_mode": "server"}, "disk", False),
     ({"peft": True, "use_vllm": True, "vllm_mode": "server", "vllm_sync": "disk"}, "disk", False)],
    ids=str,
)  # fmt: skip
def test_a_base_in_half_precision_is_one_that_no_update_is_added_to(
    options: dict[str, Any], sync: Any, may: bool
) -> None:
    config = TrainConfig(**options)
    assert (config.weight_sync, config.may_halve_base) == (sync, may)


def test_building_the_configuration_reads_no_metadata_of_other_packages() -> None:
    """pydantic would look for plugins in all that is installed, which costs more than the rest of a refusal."""
    script = "import os, aitrain; aitrain.TrainConfig(model='tiny'); from pydantic.plugin import _loader; "
    script += "print(_loader._plugins, os.environ.get('PYDANTIC_DISABLE_PLUGINS'))"
    environ = {**os.environ, "PYDANTIC_DISABLE_PLUGINS": "mine"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == ["None", "mine"]
