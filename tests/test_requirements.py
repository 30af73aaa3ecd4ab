"""What an environment declares that it needs: options take it, unless the user gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed, EnvRequirements, TrainConfig
from aitrain.environment.requirements import with_requirements
from aitrain.options.reading import resolve
from aitrain.runs.checkpoint import Manifest, changed_options
from aitrain.runs.run_folder import RunFolder

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
    assert note == (
        "Needs requires --rl-env-isolation process, --rl-max-turns 4, --rl-max-new-tokens 12, --rl-score-range -1,1,"
        " --rl-env-episodes 2."
    )


def test_a_range_may_be_any_or_a_list() -> None:
    for declared, option in (("any", "any"), ([-2, 3], "-2,3"), ((0.5, 1.5), "0.5,1.5")):
        needs: Any = declared
        assert EnvRequirements(score_range=needs).as_options() == {"rl_score_range": option}
        environment = Plain()
        environment.requirements = EnvRequirements(score_range=needs)  # type: ignore[attr-defined]
        assert with_requirements(TrainConfig(), environment)[0].rl_score_range == option


def test_an_instance_may_declare_for_itself() -> None:
    environment = Plain()
    environment.requirements = EnvRequirements(max_turns=2)  # type: ignore[attr-defined]
    assert with_requirements(TrainConfig(), environment)[0].rl_max_turns == 2


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


@pytest.mark.parametrize("own", [["a bed", "breakfast"], {"stars": 3}, {}, "none", 0])
def test_an_attribute_of_the_name_that_means_something_else_declares_nothing(own: object) -> None:
    environment = Plain()
    environment.requirements = own  # type: ignore[attr-defined]
    assert with_requirements(TrainConfig(), environment)[1] == ""


def test_an_environment_that_declares_nothing_changes_nothing() -> None:
    config = TrainConfig(rl_max_turns=3)
    assert with_requirements(config, Plain()) == (config, "")


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ({"max_turns": 4}, "Needs.requirements is a dict"),
        (EnvRequirements(max_turns=0), "Needs.requirements: rl_max_turns: "),
        (EnvRequirements(score_range=(1, -1)), "Needs.requirements: rl_score_range: "),
        (EnvRequirements(isolation="thred"), "Needs.requirements: rl_env_isolation: "),  # type: ignore[arg-type]
    ],
)
def test_a_declaration_that_cannot_be_is_a_failure_of_the_environment(requirements: Any, message: str) -> None:
    class Needs:
        pass

    environment = Needs()
    environment.requirements = requirements  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFailed) as caught:
        with_requirements(TrainConfig(), environment)
    assert str(caught.value).startswith(message)


def test_config_yaml_says_what_was_given_until_the_environment_was_asked_and_all_of_it_afterwards(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(TrainConfig(rl_max_turns=3))
    read = resolve(TrainConfig, folder.config)
    assert read.model_fields_set & AS_OPTIONS.keys() == {"rl_max_turns"}

    resolved, _ = with_requirements(read, Needs())
    folder.write_config(resolved)
    again = resolve(TrainConfig, folder.config)
    assert again.model_fields_set >= AS_OPTIONS.keys()
    assert values(again) == {**AS_OPTIONS, "rl_max_turns": 3}
    assert with_requirements(again, Plain()) == (again, "")


def manifest(config: TrainConfig, environment: object) -> Manifest:
    resolved, _ = with_requirements(config, environment)
    requires = NEEDS.as_options() if isinstance(environment, Needs) else {}
    return Manifest(1, resolved.written(), {"requires": requires}, "", 1, {})


def test_a_resumed_run_may_leave_out_again_what_the_environment_declared() -> None:
    before = manifest(TrainConfig(seed=1), Needs())
    assert changed_options(before, TrainConfig(seed=1), 1) == []
    assert changed_options(before, TrainConfig(seed=1, rl_max_turns=4), 1) == []
    assert changed_options(before, TrainConfig(seed=1, rl_max_turns=5), 1) == ["rl_max_turns: 4 -> 5"]
    assert changed_options(before, with_requirements(TrainConfig(seed=1), Plain())[0], 1) == [
        "rl_score_range: -1,1 -> 0,1", "rl_max_new_tokens: 12 -> 128", "rl_max_turns: 4 -> 16"
    ]  # fmt: skip


def test_what_the_user_gave_before_has_to_be_given_again() -> None:
    before = manifest(TrainConfig(rl_max_turns=3), Plain())
    assert changed_options(before, TrainConfig(), 1) == ["rl_max_turns: 3 -> 16"]
