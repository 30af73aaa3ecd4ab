"""Scripted players for games with several players."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from aitrain.environment.adapters.user_objects import check_objects, load_object, parse_id
from aitrain.errors import ConfigError

Opponent = Callable[[str, random.Random], str]
"""What another player says after an observation."""

MOVE = re.compile(r"\[[^\[\]\n]+\]")
OPPONENTS: dict[str, Opponent] = {
    "any_legal": lambda seen, rng: rng.choice(moves_in(seen)),
    "first_legal": lambda seen, rng: moves_in(seen)[0],
}
"""Opponents that say one of the moves in brackets that the game shows them last."""


def moves_in(seen: str) -> list[str]:
    """The moves in brackets that an observation shows.

    Raises:
        ValueError: there are none.
    """
    moves = MOVE.findall(seen)
    if not moves:
        raise ValueError("the game shows its other players no moves in brackets: give them an opponent of your own")
    return moves


def opponent_named(name: str) -> Opponent:
    """One of OPPONENTS, or a function of the user's, named `file.py:function`."""
    found: Opponent = OPPONENTS.get(name) or load_object(*parse_id(name)[0])
    return found


def check_opponent(name: str) -> None:
    """Check an opponent without running anything.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in OPPONENTS:
        return
    if ":" not in name:
        known = ", ".join(OPPONENTS)
        raise ConfigError(f"rl_env_config: there is no opponent {name}: name {known}, or a function: file.py:name")
    check_objects(parse_id(name), "function")
