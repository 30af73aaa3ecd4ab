"""Loss types: what each brings along, what wins over it, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.cli.grpo import plan_lines
from aitrain.launch.preflight import check
from aitrain.options.loss_types import LOSS_TYPES, as_markdown, remarks

COMPANIONS: dict[str, dict[str, Any]] = {
    "grpo": {"epsilon": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "scale_rewards": "group"},
    "dr_grpo": {"epsilon": 0.2, "epsilon_high": 0.2, "scale_rewards": "none"},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group"},
    "bnpo": {"epsilon": 0.2, "epsilon_high": 0.2},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {"importance_sampling_level": "token"},
    "luspo": {"epsilon": 0.002, "epsilon_high": 0.0025, "importance_sampling_level": "sequence"},
    "vespo": {"importance_sampling_level": "token"},
}


def as_trl(**options: Any) -> dict[str, Any]:
    return TrainConfig(**options).loss.as_trl()


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_loss_type_brings_its_papers_settings(name: str) -> None:
    settings = as_trl(rl_loss_type=name)
    assert settings["loss_type"] == name
    assert {field: settings[field] for field in COMPANIONS[name]} == COMPANIONS[name]


def test_every_loss_type_of_the_option_is_in_the_table() -> None:
    for name in LOSS_TYPES:
        TrainConfig(rl_loss_type=name)
    with pytest.raises(ConfigError, match="rl_loss_type"):
        TrainConfig(rl_loss_type="ppo")
    assert LOSS_TYPES.keys() == COMPANIONS.keys()


def test_vespo_multiplies_the_ratios_of_tokens_whichever_way_vllm_is_used() -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    for vllm in ({"use_vllm": True}, server, server | {"peft": True, "vllm_server_url": "http://127.0.0.1:1"}):
        assert as_trl(rl_loss_type="vespo", **vllm)["vllm_importance_sampling_mode"] == "token_truncate"
    assert "vllm_importance_sampling_mode" not in as_trl(rl_loss_type="vespo")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rl_loss_type": "dapo", "rl_clip_range": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.28}),
        ({"rl_loss_type": "dapo", "rl_clip_range": 0.4}, {"epsilon": 0.4, "epsilon_high": 0.4}),
        ({"rl_loss_type": "cispo", "rl_clip_range": 0.1}, {"epsilon_high": 5.0}),
        ({"rl_clip_range": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.1}),
        ({"rl_clip_range_high": 0.3}, {"epsilon": 0.2, "epsilon_high": 0.3}),
        ({"rl_loss_type": "dr_grpo", "rl_scale_rewards": "batch"}, {"scale_rewards": "batch"}),
        ({"rl_importance_level": "sequence"}, {"importance_sampling_level": "sequence", "epsilon": 3e-4,
                                               "epsilon_high": 4e-4}),
        ({"trl": {"importance_sampling_level": "sequence"}}, {"epsilon": 3e-4, "epsilon_high": 4e-4}),
        ({"rl_importance_level": "sequence", "rl_clip_range": 0.2}, {"epsilon": 0.2, "epsilon_high": 0.2}),
        ({"rl_loss_type": "dr_grpo", "trl": {"scale_rewards": True}}, {"scale_rewards": "group"}),
        ({"rl_loss_type": "cispo", "trl": {"epsilon_high": 4}}, {"epsilon_high": 4}),
    ],
)  # fmt: skip
def test_what_is_given_wins_over_the_loss_type(options: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = as_trl(**options)
    assert {field: settings[field] for field in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl_loss_type": "luspo", "rl_importance_level": "token"}, "rl_importance_level: luspo needs one ratio"),
        ({"rl_loss_type": "luspo", "trl": {"importance_sampling_level": "token"}}, "rl_importance_level: luspo"),
        ({"rl_loss_type": "vespo", "rl_importance_level": "sequence"}, "rl_importance_level: vespo computes"),
        ({"rl_loss_type": "cispo", "rl_clip_range_high": 0.28}, "rl_clip_range_high: for cispo"),
        ({"rl_loss_type": "cispo", "trl": {"epsilon_high": 0.2}}, "rl_clip_range_high: for cispo"),
        ({"rl_scale_rewards": "none", "trl": {"scale_rewards": "none"}}, "also given as --trl scale_rewards"),
        ({"trl": {"scale_rewards": ["group"]}}, "--trl scale_rewards: must be one of group, batch, none"),
        ({"trl": {"importance_sampling_level": "word"}}, "--trl importance_sampling_level: must be one of token"),
        ({"rl_loss_type": "cispo", "trl": {"epsilon_high": "5"}}, "--trl epsilon_high: must be a number above 0"),
        ({"trl": {"vllm_importance_sampling_mode": "tokens"}}, "must be one of token_truncate, token_mask"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.read(options)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize("where", [{}, {"vllm_mode": "server"}, {"vllm_mode": "server", "peft": True}])
def test_vespo_is_refused_where_vllm_has_one_ratio_a_completion(mode: str, where: dict[str, Any]) -> None:
    vespo = {"rl_loss_type": "vespo", "use_vllm": True, **where}
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mode: vespo"):
        TrainConfig.read({**vespo, "trl": {"vllm_importance_sampling_mode": mode}})
    TrainConfig(**vespo, trl={"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_correction": False})
    TrainConfig(**vespo, trl={"vllm_importance_sampling_mode": "token_mask"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl_loss_type": "dapo", "rl_importance_level": "sequence"}, ["counts by its length"]),
        ({"rl_loss_type": "sapo", "rl_clip_range": 0.1}, ["rl_clip_range has no effect"]),
        ({"rl_loss_type": "vespo", "rl_clip_range_high": 0.1}, ["rl_clip_range_high has no effect"]),
        ({"rl_loss_type": "cispo", "rl_clip_range": 0.1}, ["rl_clip_range has no effect"]),
        ({"rl_loss_type": "dapo", "rl_clip_range": 0.1, "rl_clip_range_high": 0.3}, []),
        ({"rl_importance_level": "sequence"}, []),
    ],
)
def test_what_is_odd_but_allowed_is_said(options: dict[str, Any], words: list[str]) -> None:
    said = list(remarks(TrainConfig(**options)))
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


def test_the_plan_shows_the_settings_that_hold() -> None:
    plan = check(TrainConfig(model="tiny", rl_loss_type="dapo", rl_scale_rewards="none"), has_environment=True)
    line = next(line for line in plan_lines(plan) if line.startswith("loss "))
    assert line.split(maxsplit=1)[1] == "dapo, a ratio for each token clipped between 0.8 and 1.28, scores not scaled"


def test_the_table_of_the_page_is_fresh() -> None:
    page = (Path(__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "put aitrain.options.loss_types.as_markdown() into the page"
