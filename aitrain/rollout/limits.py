"""Limits on the length of an episode, and what ends a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aitrain.rollout.stop_strings import StopStrings


@dataclass(frozen=True)
class Limits:
    """Limits of an episode; the prompt's tokens count for `context` only."""

    turns: int
    turn_tokens: int
    episode_tokens: int | None = None
    context: int | None = None

    def room(self, prompt: int, completion: int) -> int:
        """Maximum tokens of the next completion, after a prompt of `prompt` tokens and `completion` further ones."""
        room = self.turn_tokens
        if self.episode_tokens is not None:
            room = min(room, self.episode_tokens - completion)
        if self.context is not None:
            room = min(room, self.context - prompt - completion)
        return room


@dataclass(frozen=True)
class EndOfTurn:
    """Tells a completion that the policy ended from one that was cut off."""

    eos_ids: Sequence[int]
    """Token ids that end a completion; the first one also fills a trajectory that would be empty."""
    stop_strings: StopStrings | None = None

    def is_reached(self, ids: list[int]) -> bool:
        """Whether the last token of a completion ends it."""
        if not ids:
            return False
        return ids[-1] in self.eos_ids or (self.stop_strings is not None and self.stop_strings.ends(ids))
