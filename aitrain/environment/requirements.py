"""What an environment declares that it needs, as values for options that the user did not give."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.options.environment import DECLARED_OPTIONS
from aitrain.options.train import TrainConfig


@dataclass(frozen=True)
class EnvRequirements:
    """What an environment needs of a run; set it as `requirements` of the class or the instance. None: any value.

    An option that the user gives wins over it.
    """

    isolation: Literal["thread", "process"] | None = None
    """--rl-env-isolation"""
    max_turns: int | None = None
    """--rl-max-turns"""
    max_new_tokens: int | None = None
    """--rl-max-new-tokens"""
    score_range: tuple[float, float] | str | None = None
    """--rl-score-range"""
    episodes_at_once: int | None = None
    """--rl-env-episodes"""

    def as_options(self) -> dict[str, object]:
        """The declared values by the names of their options."""
        values = {DECLARED_OPTIONS[field.name]: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def requirements_of(environment: object) -> EnvRequirements:
    """The environment's `requirements`; without one, or with an attribute of this name that means something else,
    nothing is required.

    Raises:
        EnvironmentFailed: it is a dict of what EnvRequirements takes.
    """
    declared = getattr(environment, "requirements", None)
    if isinstance(declared, dict) and declared and declared.keys() <= DECLARED_OPTIONS.keys():
        raise EnvironmentFailed(
            f"{type(environment).__name__}.requirements is a dict\n"
            f"Write requirements = aitrain.EnvRequirements({next(iter(declared))}=...)."
        )
    return declared if isinstance(declared, EnvRequirements) else EnvRequirements()


def with_largest(config: TrainConfig, parts: Sequence[TrainConfig]) -> TrainConfig:
    """The options of a run with several environments: of what they require, the longest episodes and the widest scores.
    All options that can be declared count as given afterwards."""
    lows, highs = zip(*(part.score_bounds for part in parts), strict=True)
    widest = next((part.rl_score_range for part in parts if part.score_bounds == (min(lows), max(highs))), None)
    return config.model_copy(
        update={
            "rl_env_isolation": config.rl_env_isolation,
            "rl_env_episodes": config.rl_env_episodes,
            "rl_max_turns": max(part.rl_max_turns for part in parts),
            "rl_max_new_tokens": max(part.rl_max_new_tokens for part in parts),
            "rl_score_range": widest or f"{min(lows)},{max(highs)}",
        }
    )


def with_requirements(config: TrainConfig, environment: object) -> tuple[TrainConfig, str]:
    """The options with what the environment declares in the place of those that were not given, and a note about them;
    empty without any. All options that can be declared count as given afterwards.

    Raises:
        EnvironmentFailed: a declared value is not one of its option.
    """
    given = config.model_fields_set
    declared = {name: value for name, value in requirements_of(environment).as_options().items() if name not in given}
    values = {name: getattr(config, name) for name in (*given, *DECLARED_OPTIONS.values())}
    try:
        resolved = type(config)(**{**values, **declared})
    except ConfigError as error:
        raise EnvironmentFailed(f"{type(environment).__name__}.requirements: {error}") from error
    flags = [f"--{name.replace('_', '-')} {getattr(resolved, name)}" for name in declared]
    return resolved, f"{type(environment).__name__} requires {', '.join(flags)}." if flags else ""
