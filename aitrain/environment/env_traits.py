"""What is known of an environment and its options before it is played."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from aitrain.environment.contract import Case, env_kind, scores_groups
from aitrain.execution.processes import ProcessPool
from aitrain.options.train import TrainConfig


class EnvTraits:
    """The part of an EnvRunner that makes no calls."""

    environment: Any
    config: TrainConfig
    processes: ProcessPool | None

    @property
    def parts(self) -> dict[str, Self]:
        """The runners of all environments of the run by their names, as in MixedRunner: itself."""
        return {"": self}

    def part_of(self, case: Case) -> Self:
        """The runner of a case, as in MixedRunner: itself."""
        return self

    @property
    def label(self) -> str:
        """Name of the environment's class."""
        return type(self.environment).__qualname__

    @cached_property
    def kind(self) -> str:
        """Which of ENV_KINDS the environment has."""
        return env_kind(self.environment)

    @cached_property
    def has_sessions(self) -> bool:
        """Whether an episode has calls before its score: `episode`, `start` or tools."""
        return self.kind != "score_episode" or hasattr(self.environment, "get_tools")

    @property
    def scores_groups(self) -> bool:
        """Whether the episodes of a group are scored together."""
        return scores_groups(self.environment)

    @property
    def episodes_at_once(self) -> int | None:
        """Number of episodes that may be played at the same time; None: any."""
        return self.config.rl_env_episodes if self.has_sessions else None

    @property
    def process_fds(self) -> list[int]:
        """File descriptors of the connection to its processes, which those of other environments must not hold open."""
        return self.processes.fds if isinstance(self.processes, ProcessPool) else []
