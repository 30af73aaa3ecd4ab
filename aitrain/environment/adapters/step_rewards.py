"""Rewards that a server gives step by step, and the score of an episode that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aitrain.environment.contract import Score
from aitrain.errors import ConfigError


@dataclass
class StepRewards:
    """The rewards of one episode. Its score is their sum or the last of them; without any it is `unrewarded`, as the
    policy did nothing that is rewarded."""

    use: str = "sum"
    unrewarded: float | None = 0.0
    values: list[float] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)
    """Numbers that came with rewards, such as their components; the last of each name."""

    def add(self, reward: float | None, details: object = None) -> None:
        """Add the reward of a step; None is no reward."""
        if reward is not None:
            self.values.append(float(reward))
        if isinstance(details, Mapping):
            self.details |= {str(name): float(value) for name, value in details.items() if is_number(value)}

    @property
    def score(self) -> Score:
        """The score, with the sum and the number of rewards as metrics."""
        metrics = {**self.details, "return": sum(self.values), "rewards": float(len(self.values))}
        if not self.values:
            return Score(self.unrewarded, metrics)
        return Score(self.values[-1] if self.use == "last" else sum(self.values), metrics)


def check_use(use: str) -> str:
    """The setting `rewards` of an adapter.

    Raises:
        ConfigError: it is neither sum nor last.
    """
    if use not in ("sum", "last"):
        raise ConfigError(f"rl_env_config: rewards must be sum or last, not {use}")
    return use


def is_number(value: object) -> bool:
    """Whether a JSON value is a number or a truth value."""
    return isinstance(value, (bool, int, float))
