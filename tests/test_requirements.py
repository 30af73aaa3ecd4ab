"""What an environment declares that it needs: options take it, unless the user gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed, EnvRequirements, TrainConfig
from aitrain.environment.requirements import with_requirements
from aitrain.options.reading import resolve
from aitrain.runs.checkpoint import Manifest, changed_options

NEEDS = EnvRequirements(
    isolation="process", max_turns=4, max_new_tokens=12, score_range=(-1, 1), episodes_at_once=2
)  # fmt: skip
AS_OPTIONS = {
    "rl_env_isolation": "process", "rl_max_turns": 4, "rl_max_new_tokens": 12, "rl_score_range": "-1,1",
    "rl_env_episodes": 2,
}  # fmt: skip


class Needs:
    requirements: Any = NEEDS


class Plain:
    pass


def values(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in AS_OPTIONS}


def test_options_that_were_not_given_take_what_the_environment_declares() -> None:
    config, note = with_requirements(TrainConfig(seed=3), Needs())
    assert values(config) == AS_OPTIONS
    assert config.seed == 3
    assert config.score_bounds == (-1.0, 1.0)
    assert "--rl-env-isolation process, --rl-max-turns 4" in note


def test_an_instance_may_declare_for_itself_and_another_attribute_of_the_name_declares_nothing() -> None:
    environment: Any = Plain()
    environment.requirements = EnvRequirements(score_range=(-2, 3))
    assert with_requirements(TrainConfig(), environment)[0].rl_score_range == "-2,3"
    environment.requirements = {"stars": 3}
    assert with_requirements(TrainConfig(seed=3), environment) == (TrainConfig(seed=3), "")


def test_an_option_that_was_given_wins_even_if_it_is_the_default(tmp_path: Path) -> None:
    """In Python, in a file, and as a flag."""
    file = tmp_path / "config.yaml"
    file.write_text("rl_max_turns: 16\n")
    for config in (
        TrainConfig(rl_max_turns=16),
        resolve(TrainConfig, file),
        resolve(TrainConfig, None, {"rl_max_turns": "16"}),
    ):
        resolved, note = with_requirements(config, Needs())
        assert (resolved.rl_max_turns, resolved.rl_max_new_tokens) == (16, 12)
        assert "max-turns" not in note


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ({"max_turns": 4}, "Plain.requirements is a dict"),
        (EnvRequirements(score_range=(1, -1)), "Plain.requirements: rl_score_range: "),
    ],
)
def test_a_declaration_that_cannot_be_is_a_failure_of_the_environment(requirements: Any, message: str) -> None:
    environment: Any = Plain()
    environment.requirements = requirements
    with pytest.raises(EnvironmentFailed) as caught:
        with_requirements(TrainConfig(), environment)
    assert str(caught.value).startswith(message)


def test_a_resumed_run_may_leave_out_again_what_the_environment_declared() -> None:
    resolved, _ = with_requirements(TrainConfig(seed=1), Needs())
    before = Manifest(1, resolved.written(), {"requires": NEEDS.as_options()}, "", 1, 8)
    assert changed_options(before, TrainConfig(seed=1), 1, 8) == []
    assert changed_options(before, TrainConfig(seed=1, rl_max_turns=4), 1, 8) == []
    assert changed_options(before, TrainConfig(seed=1, rl_max_turns=5), 1, 8) == ["rl_max_turns: 4 -> 5"]
