"""Loss types: what each brings along, what wins over it, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import EnvRequirements, TrainConfig
from aitrain.batch import plan_batch
from aitrain.environment.requirements import with_requirements
from aitrain.options.reading import resolve
from aitrain.options.yaml_text import write_yaml


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rl_loss_type": "luspo"}, {"epsilon_high": 0.0025, "importance_sampling_level": "sequence"}),
        ({"rl_loss_type": "dapo", "rl_clip_range": 0.4}, {"epsilon": 0.4, "epsilon_high": 0.4}),
        ({"rl_loss_type": "vespo", "use_vllm": True}, {"vllm_importance_sampling_mode": "token_truncate"}),
    ],
)  # fmt: skip
def test_a_loss_type_brings_its_settings_and_given_ones_win(options: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = TrainConfig(**options).loss
    assert {field: settings[field] for field in expected} == expected


# -- presets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("recommended", {"beta": 0.0, "loss_type": "dapo", "num_generations": 8, "max_completion_length": 512}),
        ("dapo", {"beta": 0.0, "loss_type": "dapo", "epsilon_high": 0.28, "steps_per_generation": 16}),
        ("dr_grpo", {"scale_rewards": "none", "steps_per_generation": 8}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ],
)  # fmt: skip
def test_a_preset_sets_a_papers_algorithm_and_is_read_back(name: str, expected: dict[str, Any], here: Path) -> None:
    from aitrain.training.model import choose_precision
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(rl_preset=name, mixed_precision="no")
    settings = grpo_arguments(config, plan_batch(config, 1), choose_precision(config))
    assert {field: settings[field] for field in expected} == expected
    assert (config.rl_sampling, config.overlong_buffer) == (
        ("refill", 25) if name in ("dapo", "cispo") else ("uniform", None)
    )
    written = write_yaml(TrainConfig(rl_preset=name, rl_scale_rewards="batch").written())
    (here / "config.yaml").write_text(written)
    assert resolve(TrainConfig, here / "config.yaml") == TrainConfig(rl_preset=name, rl_scale_rewards="batch")


def test_given_options_and_what_an_environment_declares_win_over_a_preset() -> None:
    config = TrainConfig(rl_preset="dapo", rl_kl_coef=0.02, rl_max_new_tokens="50", rl_clip_range_high=0.3)
    assert (config.rl_kl_coef, config.loss["epsilon_high"], config.overlong_buffer) == (0.02, 0.3, 10)
    config = TrainConfig(rl_preset="recommended", rl_loss_type="gspo", gradient_accumulation=4)
    assert (config.loss["epsilon_high"], plan_batch(config, 1).prompts_per_step) == (4e-4, 1)
    assert config.changed()["gradient_accumulation"] == 4  # which is the option's default
    declared = SimpleNamespace(requirements=EnvRequirements(max_new_tokens=9))
    assert with_requirements(config, declared)[0].rl_max_new_tokens == 9
    thinks = TrainConfig(rl_preset="recommended", thinking=100)  # which adds to the limit of an answer
    assert (thinks.completion_tokens, with_requirements(thinks, declared)[0].completion_tokens) == (628, 125)
