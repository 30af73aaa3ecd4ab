"""Loss types: what each brings along, what wins over it, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, EnvRequirements, TrainConfig
from aitrain.batch import RolloutSize, plan_batch
from aitrain.cli.grpo import plan_lines
from aitrain.environment.requirements import with_requirements
from aitrain.launch.preflight import check
from aitrain.options.loss_types import LOSS_TYPES, as_markdown, remarks
from aitrain.options.presets import PRESETS
from aitrain.options.presets import as_markdown as presets_table
from aitrain.options.reading import resolve
from aitrain.options.yaml_text import write_yaml

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
    page = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "put aitrain.options.loss_types.as_markdown() into the page"


# -- presets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"beta": 0.04, "loss_type": "grpo", "epsilon_high": 0.2, "steps_per_generation": 4}),
        ("dapo", {"beta": 0.0, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "steps_per_generation": 64}),
        ("dr-grpo", {"beta": 0.0, "loss_type": "dr_grpo", "scale_rewards": "none", "steps_per_generation": 32}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
                  "steps_per_generation": 16}),
        ("cispo", {"beta": 0.0, "loss_type": "cispo", "epsilon_high": 5.0, "steps_per_generation": 64}),
    ],
)  # fmt: skip
def test_a_preset_sets_a_papers_algorithm(name: str, expected: dict[str, Any]) -> None:
    from aitrain.training.model import choose_precision
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(rl_preset=name, mixed_precision="no")
    settings = grpo_arguments(config, plan_batch(config, 1), choose_precision(config))
    assert {field: settings[field] for field in expected} == expected
    assert (config.rl_sampling, config.overlong_buffer) == (
        ("refill", 25) if name in ("dapo", "cispo") else ("uniform", None)
    )


def test_every_preset_of_the_option_is_in_the_table_and_on_the_page() -> None:
    for name in PRESETS:
        TrainConfig(rl_preset=name)
    with pytest.raises(ConfigError, match="rl_preset"):
        TrainConfig(rl_preset="ppo")
    page = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert presets_table() in page, "put aitrain.options.presets.as_markdown() into the page"


def test_given_options_and_fields_win_over_a_preset_wherever_they_are_given(here: Path) -> None:
    config = TrainConfig(rl_preset="dapo", rl_kl_coef=0.02, rl_max_new_tokens="50", trl={"epsilon_high": 0.3})
    assert (config.rl_kl_coef, config.loss.high, config.overlong_buffer) == (0.02, 0.3, 10)
    assert config.loss.loss_type == "dapo"
    lines = [
        line.strip()
        for line in "\n".join(plan_lines(check(config.model_copy(update={"model": "tiny"}), True))).splitlines()
    ]
    assert "rl_kl_coef 0.02 (given; dapo has 0)" in lines
    assert "rl_clip_range_high 0.3 (given; dapo has 0.28)" in lines
    assert "rl_updates_per_rollout 16" in lines

    (here / "own.yaml").write_text("rl_preset: dapo\nrl_kl_coef: 0.02\nlr: 1e-4\n")
    assert resolve(TrainConfig, here / "own.yaml").rl_kl_coef == 0.02
    other = resolve(TrainConfig, here / "own.yaml", {"rl_preset": "gspo"})
    assert (other.rl_kl_coef, other.loss.level, other.lr) == (0.0, "sequence", 1e-4)


def test_the_overlong_buffer_of_a_preset_follows_the_length_that_an_environment_declares(here: Path) -> None:
    """Also where that is shorter than a fifth of the default."""

    class Declares:
        requirements: EnvRequirements

    for length, buffer in ((16, 3), (1000, 200)):
        Declares.requirements = EnvRequirements(max_new_tokens=length)
        config, _ = with_requirements(TrainConfig(rl_preset="dapo"), Declares())
        assert (config.rl_max_new_tokens, config.overlong_buffer) == (length, buffer)
        (here / "config.yaml").write_text(write_yaml(config.written()))
        other = resolve(TrainConfig, here / "config.yaml", {"rl_preset": "gspo"})
        assert (other.overlong_buffer, other.rl_updates_per_rollout) == (None, 4)


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_of_a_preset_is_read_back_as_it_was(name: str, here: Path) -> None:
    config = TrainConfig(rl_preset=name, rl_scale_rewards="batch")
    (here / "config.yaml").write_text(write_yaml(config.written()))
    assert resolve(TrainConfig, here / "config.yaml") == config


def test_the_plan_says_what_is_off_policy() -> None:
    def rollout(**options: Any) -> str:
        config = TrainConfig(**options)
        return str(RolloutSize.of(config, plan_batch(config, 1)))

    assert rollout() == "2 prompts x 4 completions = 8, for one optimizer step; on-policy"
    later = "optimizer steps; the first is on-policy, the later ones are off-policy"
    assert rollout(rl_updates_per_rollout=4) == f"8 prompts x 4 completions = 32, for 4 {later}"
    assert (
        rollout(rl_updates_per_rollout=2, trl={"num_iterations": 2}) == f"4 prompts x 4 completions = 16, for 4 {later}"
    )
    assert rollout(trl={"steps_per_generation": 2}).endswith("= 4, several for each optimizer step; all on-policy")
    several = check(TrainConfig(model="tiny", rl_updates_per_rollout=4), has_environment=True)
    assert "1 x training cases / 2, rounded up to whole rollouts" in "\n".join(plan_lines(several))
    ahead = {"rl_ahead": 1, "use_vllm": True, "vllm_mode": "server", "peft": True}
    assert rollout(**ahead).endswith("for one optimizer step; all off-policy, as it is sampled ahead")
    assert rollout(**ahead, rl_updates_per_rollout=2).endswith(
        "2 optimizer steps; all off-policy, as it is sampled ahead"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl_dual_clip": 1.1}, "rl_dual_clip: 1.1 is within the clip range, which ends at 1.2"),
        ({"rl_dual_clip": 1.0}, "rl_dual_clip: must be above 1"),
        ({"rl_dual_clip": 3.0, "trl": {"delta": 2.0}}, "rl_dual_clip: also given as --trl delta"),
        ({"rl_entropy_coef": 0.1, "trl": {"entropy_coef": 0.2}}, "rl_entropy_coef: also given as --trl entropy_coef"),
        ({"rl_updates_per_rollout": 2, "trl": {"steps_per_generation": 8}}, "rl_updates_per_rollout: also given as"),
        ({"rl_updates_per_rollout": 2, "trl": {"generation_batch_size": 8}}, "rl_updates_per_rollout: also follows"),
        ({"rl_overlong_buffer": 200}, "rl_overlong_buffer: 200 tokens are more than a completion may have, 128"),
        ({"rl_overlong_penalty": 0.5}, "rl_overlong_penalty: nothing is subtracted without --rl-overlong-buffer"),
        ({"custom_loss": "a:b", "trl": {"top_entropy_quantile": 0.2}}, "custom_loss: --trl top_entropy_quantile"),
    ],
)
def test_parts_of_the_algorithm_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.read(options)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl_loss_type": "cispo", "rl_dual_clip": 3.0}, "rl_dual_clip has no effect: cispo"),
        ({"custom_loss": "a:b", "rl_clip_range": 0.1}, "rl_clip_range has no effect: custom_loss"),
        ({"rl_kl_coef": 0.0, "rl_kl_estimator": "k1"}, "rl_kl_estimator and rl_kl_in have no effect"),
        ({"rl_kl_estimator": "k1", "trl": {"use_bias_correction_kl": False}}, "no gradient on average"),
    ],
)
def test_parts_of_the_algorithm_without_an_effect_are_noted(options: dict[str, Any], words: str) -> None:
    (said,) = remarks(TrainConfig(**options))
    assert words in said
