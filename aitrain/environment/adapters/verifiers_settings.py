"""The settings of both adapters of verifiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from aitrain.environment.adapters.settings import (
    ChatMessage,
    ScoreRange,
    choose,
    read_score_range,
    solved_cases,
    with_system,
)
from aitrain.environment.adapters.user_objects import package_files, source_files
from aitrain.environment.user_modules import module_specs
from aitrain.errors import ConfigError

Foreign: TypeAlias = Any
"""An object of verifiers, which has no types here."""


@dataclass(frozen=True)
class VerifiersSettings:
    """The settings of both adapters."""

    id: str
    size: int | None = None
    seed: int | None = None
    system: str | None = None
    few_shot: int = 0
    score_range: object = None
    arguments: Mapping[str, object] = field(default_factory=dict)

    def read_range(self, weights: Sequence[float]) -> ScoreRange:
        """The range of scores.

        Raises:
            ConfigError: it is not set: verifiers does not bound the value of a reward function.
        """
        if self.score_range is None:
            low, high = sum(min(0.0, weight) for weight in weights), sum(max(0.0, weight) for weight in weights)
            raise ConfigError(
                "rl_env_config: a verifiers environment does not say between which values its rewards are: set"
                f" score_range\nIts weights are {', '.join(f'{weight:g}' for weight in weights)}: if each reward is"
                f' from 0 to 1, that is "score_range": "{low:g},{high:g}".'
            )
        return read_score_range(self.score_range, "verifiers")

    @property
    def module(self) -> str:
        """The module of the id, which may name an owner, a version, a function or an environment around a taskset."""
        return self.id.rpartition("+")[2].partition(":")[0].rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")

    def source_files(self, objects: Iterable[object]) -> list[Path]:
        """The files of the module, and those that define these parts of its environment."""
        own = package_files(self.module) if module_specs(self.module) else []
        return list(dict.fromkeys([*own, *source_files((), objects, "verifiers")]))

    def choose_rows(self, count: int) -> tuple[list[int], list[int]]:
        """Numbers of the rows that are solved cases of the prompts, and of those that are asked."""
        size = None if self.size is None else self.size + self.few_shot
        chosen = choose(range(count), size, self.seed)
        return chosen[: self.few_shot], chosen[self.few_shot :]

    def prompt_with(self, prompt: Sequence[ChatMessage], shots: Sequence[tuple[str, object]]) -> list[ChatMessage]:
        """A prompt with the system prompt and the solved cases of the settings.

        Raises:
            ConfigError: a solved case has no answer.
        """
        own = with_system(prompt, self.system)
        head = [message for message in own[:1] if message["role"] == "system"]
        for question, answer in shots:
            if not isinstance(answer, (str, int, float)) or not question or answer == "":
                raise ConfigError("rl_env_config: few_shot: the cases of this environment have no `answer` to show")
        solved = solved_cases((question, str(answer)) for question, answer in shots)
        return [*head, *solved, *own[len(head) :]]
