"""The JSON schema of config files: it takes every file that aitrain writes, and refuses what aitrain refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from aitrain import ConfigError, TrainConfig
from aitrain.options.option import Option, options_of
from aitrain.options.schema import json_schema
from aitrain.options.section import sections_of
from aitrain.options.yaml_text import read_yaml
from aitrain.runs.run_folder import RunFolder
from tests import properties

ROOT = Path(__file__).parents[1]
SCHEMA: dict[str, Any] = json_schema(TrainConfig)
VALIDATOR = Draft202012Validator(SCHEMA)
OPTIONS = options_of(TrainConfig)


def test_the_schema_is_one_of_draft_2020_12() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)


def test_the_command_prints_the_schema(here: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "aitrain", "schema"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == SCHEMA


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_has_its_description_and_default_in_the_schema(option: Option) -> None:
    stated = SCHEMA["properties"][option.name]
    assert (stated["description"], stated["default"]) == (option.description, option.default)
    assert VALIDATOR.is_valid({option.name: option.default})


SAMPLES: list[object] = [
    -(10**9), -3, -2.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 2**32, "", " ", "no-such-word", [], [[1]], {}, [""], "a,b",
    "http://x:1", "1,x", "/", "..", True, False,
]  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "rl_env_class": {"rl_env": "x.py"},
    "rl_env_weights": {"rl_env": ["x.py", "y.py"]},
    "rl_max_episode_tokens": {"rl_max_new_tokens": 1},
    "rl_min_new_tokens": {"rl_max_new_tokens": 2**33},
    "vllm_server_url": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_servers": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_listen_address": {"use_vllm": True, "vllm_mode": "server"},
    "rl_overlong_penalty": {"rl_overlong_buffer": 1},
    "vllm_quantization": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_speculative": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_data_parallel_size": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_args": {"use_vllm": True, "vllm_mode": "server"},
    "tokens_per_pass": {"rl_prompts_per_step": 2},
    "max_failures": {"launcher": "ray"},
    "rl_refill_limit": {"rl_sampling": "refill"},
}
"""Other options that an option needs, so that only its own type and bounds refuse a value."""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_what_an_option_refuses_by_itself_the_schema_refuses(option: Option) -> None:
    (section,) = [owner for owner in sections_of(TrainConfig) if option.name in owner.model_fields]
    refused = 0
    for sample in SAMPLES:
        try:
            section(**{**WITH.get(option.name, {}), option.name: sample})
        except ConfigError:
            refused += 1
            assert not VALIDATOR.is_valid({option.name: sample}), sample
    assert refused > 0


@pytest.mark.parametrize("wrong", [{"no_such_option": 1}, {"learning_rate": 1e-5}, {"params": {"lr": 1e-5}}], ids=str)
def test_the_schema_refuses_unknown_keys(wrong: dict[str, object]) -> None:
    assert not VALIDATOR.is_valid(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "", "lr: 1e-5", "trl:", "trl: {num_iterations: 2}", "target_modules: [q_proj, v_proj]", "max_steps: null",
        "rl_stop: ['</a>', '\n']", "rl_score_range: [-1, 1]", "rl_score_range: any", "log: wandb,tensorboard",
        "log: [wandb, trackio]", "rl_env_config: {city: Rome}", "rl_env_config: '@e.json'", "logging_steps: -1",
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_takes_every_form_of_a_value(text: str, here: Path) -> None:
    (here / "e.json").write_text("{}")
    values: Any = read_yaml(text) or {}
    TrainConfig(**values)
    assert VALIDATOR.is_valid(values)


EXAMPLES: list[dict[str, Any]] = [
    {},
    {"rl_prompts_per_step": 8},
    {"rl_env": ["x.py", "b=y.py"], "rl_env_weights": [2, 0.5], "rl_env_config": {"b": {"a": 1}}},
    {"rl_env": "x.py", "rl_env_config": {"a": [1, None, {"b": "é"}]}, "trl": {"delta": None, "num_iterations": 2}},
    {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://localhost:8000/v1", "peft": True},
    {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": ["http://a:8000", "https://b:8000"]},
    {"target_modules": ["q_proj", "v_proj"], "log": ["wandb", "trackio"], "rl_stop": "</a>", "rl_score_range": [-1, 1]},
    {"quantization": "int4", "peft": True, "eval_strategy": False, "save_total_limit": None, "max_steps": 3},
    {"project_name": "Ü-1.5_a+b", "chat_template": "x.jinja", "save_best": True, "logging_steps": 5},
]


@pytest.mark.parametrize("options", EXAMPLES, ids=str)
def test_a_run_folder_has_the_schema_of_its_config_beside_it(options: dict[str, Any], here: Path) -> None:
    folder = RunFolder.create(TrainConfig(**options))
    folder.write_config(TrainConfig(**options))

    first, _, _ = folder.config.read_text(encoding="utf-8").partition("\n")
    key, _, place = first.partition("=")

    assert key == "# yaml-language-server: $schema"
    schema = json.loads((folder.config.parent / place).read_text(encoding="utf-8"))
    assert schema == SCHEMA
    Draft202012Validator(schema).validate(read_yaml(folder.config.read_text(encoding="utf-8")))


SHOWN = [
    text
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    for text in re.findall(r"^```yaml.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not text.startswith("search:")  # a sweep's file, which has no schema
]
SHIPPED = [
    file.read_text(encoding="utf-8")
    for folder in ("docs", "aitrain/envs")  # recipes have schemas of their own: tests/test_recipes.py
    for file in (ROOT / folder).rglob("*.yaml")
    if file.parent.name != "examples"  # of other programs: Kubernetes, SkyPilot
]


@pytest.mark.parametrize("text", [*SHOWN, *SHIPPED])
def test_a_file_of_options_that_is_shown_or_shipped_names_the_schema_and_keeps_to_it(text: str) -> None:
    assert text.startswith("# yaml-language-server: $schema=")
    values: Any = read_yaml(text)
    VALIDATOR.validate(values)
    assert TrainConfig(**values)


@settings(max_examples=150, deadline=None)
@given(properties.likely_mappings)
def test_the_schema_takes_whatever_aitrain_writes(mapping: dict[str, Any]) -> None:
    try:
        config = TrainConfig(**mapping)
    except ConfigError:
        return
    VALIDATOR.validate(config.written())
