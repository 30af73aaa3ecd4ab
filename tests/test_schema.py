"""The JSON schema of config files: it takes every file that aitrain writes, and refuses what aitrain refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aitrain import TrainConfig
from aitrain.options.section import options_of
from aitrain.options.yaml_text import read_yaml
from aitrain.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
SCHEMA: dict[str, Any] = TrainConfig.model_json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
OPTIONS = options_of(TrainConfig)


def test_the_schema_is_valid_describes_every_option_and_refuses_unknown_keys() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for option in OPTIONS:
        stated = SCHEMA["properties"][option.name]
        assert (stated["description"], stated["default"]) == (option.description, option.default)
        assert VALIDATOR.is_valid({option.name: option.default})
    for wrong in (
        {"learning_rate": 1e-5},
        {"lr": -1},
        {"rl_loss_type": "no-such-word"},
        {"peft": 3},
        {"max_steps": 1.5},
    ):
        assert not VALIDATOR.is_valid(wrong), wrong


@pytest.mark.parametrize(
    "text",
    [
        "", "trl: {num_iterations: 2, delta: null}", "target_modules: [q_proj, v_proj]", "max_steps: null",
        "rl_stop: ['</a>', '\n']", "rl_score_range: [-1, 1]", "rl_env_config: '{}'",
        "rl_env: [a=x.py, b=y.py]\nrl_env_weights: [2, 0.5]\nrl_env_config: {b: {a: [1, null, {b: é}]}}",
        "use_vllm: true\nvllm_mode: server\nvllm_server_url: ['http://a:1', 'https://b:2']",
    ],
    ids=str,
)  # fmt: skip
def test_every_form_of_a_value_is_valid_and_so_is_what_a_run_folder_has_of_it(text: str, here: Path) -> None:
    (here / "e.json").write_text("{}")
    values: Any = read_yaml(text) or {}
    VALIDATOR.validate(values)

    folder = RunFolder.create(TrainConfig(**values))
    folder.write_config(TrainConfig(**values))
    written = folder.config.read_text(encoding="utf-8")
    VALIDATOR.validate(read_yaml(written))


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
