"""Settings that mean the same in all adapters.

A score is passed on in the framework's own range, which the adapter declares, and is not rescaled.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from aitrain.environment.requirements import EnvRequirements
from aitrain.errors import ConfigError

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


@dataclass(eq=False)
class AdaptedEnvironment:
    """What all adapters take.

    Raises:
        ConfigError: there is no score_range.
    """

    id: str
    """What follows the adapter's name."""
    _: KW_ONLY
    size: int | None = None
    """Number of cases; of rows that are at hand, the first ones."""
    seed: int | None = None
    """Which cases are generated; rows that are at hand are shuffled with it, and keep their order without it."""
    system: str | None = None
    """System prompt, in place of the environment's own."""
    score_range: Any = None
    """Lowest and highest score, as in --rl-score-range; needed where the framework does not say."""
    isolation: ClassVar[Literal["process"] | None] = "process"

    def __post_init__(self) -> None:
        if self.score_range is None:
            raise ConfigError(
                f"rl_env_config: {self.id} does not say its lowest and its highest score: set score_range\n"
                'For example: --rl-env-config \'{"score_range": "0,1"}\', or "any" for any number.'
            )
        self.requirements = EnvRequirements(self.isolation, score_range=self.score_range)

    def choose(self, rows: Sequence[Any]) -> list[Any]:
        """The first `size` rows; of the rows shuffled with the seed, if there is one."""
        chosen = list(rows)
        if self.seed is not None:
            random.Random(self.seed).shuffle(chosen)
        return chosen[: self.size]


@dataclass(eq=False, kw_only=True)
class PackageEnvironment(AdaptedEnvironment):
    """An environment of an installed package."""

    arguments: JsonMapping = field(default_factory=dict)
    """Those of the framework's own environment."""


def seed_generators(seed: int) -> None:
    """Seed the global random generators, from which games draw. An episode has them for itself: it has a process of its
    own, or episodes of threads are played one after another, as this is a change that others see."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(seed % 2**32)


@dataclass(eq=False, kw_only=True)
class Games(PackageEnvironment):
    """Games that speak first."""

    size: int = 200
    seed: int = 0

    def build_dataset(self) -> list[dict[str, object]]:
        """One row for each game, with its seed, and no prompt but the system prompt."""
        numbers = range(self.seed, self.seed + self.size)
        return [{"prompt": prompted([], self.system), "game_seed": number} for number in numbers]


def prompted(prompt: Sequence[Mapping[str, object]], system: str | None) -> list[JsonObject]:
    """A prompt's messages with this system prompt in place of their own, if one is set."""
    messages = [dict(message) for message in prompt]
    if system is None:
        return messages
    return [{"role": "system", "content": system}, *(one for one in messages if one["role"] != "system")]
