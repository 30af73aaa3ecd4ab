"""Types of an environment and of its parts, for editors and type checkers; a run checks the methods by itself.

Methods are called by signature, so a protocol states what a method returns, and leaves its parameters open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, TypeAlias, TypeVar

from aitrain.environment.contract import Score

T_co = TypeVar("T_co", covariant=True)
MaybeAsync: TypeAlias = T_co | Awaitable[T_co]
"""The result of a method that may be `async def`."""

Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""What `build_dataset` returns: one mapping for each case; a `datasets.Dataset` is one as well."""

EnvText: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What an environment says: text, a message, or messages with `role` and `content`."""

ScoreValue: TypeAlias = SupportsFloat | Score | Mapping[str, Any] | None
"""A score: a number, a Score, a dict with `score` and metrics, or None for unscored."""

EpisodeGenerator: TypeAlias = Generator[EnvText | None, str, ScoreValue]
"""What `episode` returns: it yields what the environment says, is sent the answers, and returns the score."""


class Environment(Protocol):
    """An environment: its dataset, and one of `score_episode`, `episode`, `start` and `rollout`, which plays a case.

    Assign an instance to a variable of this type, or inherit from it, to have `build_dataset` checked.
    """

    @property
    def build_dataset(self) -> Callable[..., MaybeAsync[Rows]]:
        """Returns the rows; may take the tokenizer."""


class EpisodeObject(Protocol):
    """What `start` returns: one episode. It may also have `opening`, `get_tools` and `close`."""

    @property
    def step(self) -> Callable[..., MaybeAsync[EnvText | None]]:
        """What the environment says after an answer; None ends the episode. Takes the answer, and `calls` if named."""

    @property
    def score(self) -> Callable[[], MaybeAsync[ScoreValue]]:
        """The score, also of an episode that a limit ended."""


class SpeakingFirst(EpisodeObject, Protocol):
    """An episode that the environment begins."""

    @property
    def opening(self) -> Callable[[], MaybeAsync[EnvText | None]]:
        """What the environment says before the first answer."""
