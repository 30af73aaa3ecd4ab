"""Episodes of environments with `rollout`, played with a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aitrain.environment.contract import Case
from aitrain.rollout.chat_format import ChatFormat, TemplateSupport
from aitrain.rollout.engine import Engine
from aitrain.rollout.episode import Episode
from aitrain.rollout.limits import Limits
from tests.rollout import scripted
from tests.rollout.scripted import Letters


class Asks:
    """Base of the environments: rows are not needed, as tests play cases of their own."""

    def build_dataset(self) -> list[Any]:
        return []


class WithTools(TemplateSupport):
    """A template that can write calls and their results."""

    has_tool_calls = True


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def play(
    environment: object, engine: Engine, limits: Limits | None = None, of: Sequence[Case] = (), **options: Any
) -> tuple[list[Episode], list[str]]:
    """Episodes of these cases (one, if none are given), and the notes that the user was shown."""
    notes: list[str] = []
    chat = ChatFormat(Letters(), support=WithTools())
    return scripted.play(environment, engine, limits, of, chat, notes.append, **options), notes


def play_one(environment: object, engine: Engine, limits: Limits | None = None, **options: Any) -> Episode:
    """The episode of one case."""
    (episode,), _ = play(environment, engine, limits, **options)
    return episode
