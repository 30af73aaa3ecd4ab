"""Games of TextArena: `--rl-env textarena:GuessTheNumber-v0`, also for several players with scripted opponents.

Settings: those of `settings.py`, `players`, `seat` and `opponent`.
"""

import random
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from aitrain.environment.adapters.settings import Games, seed_generators
from aitrain.environment.contract import Score
from aitrain.environment.user_modules import load_function, source_files
from aitrain.errors import ConfigError

Opponent = Callable[[str, random.Random], str]
"""What another player says after an observation."""

MOVE = re.compile(r"\[[^\[\]\n]+\]")


def any_legal(seen: str, rng: random.Random) -> str:
    """Any of the moves in brackets that the game shows.

    Raises:
        ValueError: there are none.
    """
    moves: list[str] = MOVE.findall(seen)
    if not moves:
        raise ValueError("the game shows its other players no moves in brackets: give them an opponent of your own")
    return rng.choice(moves)


GAME = -1  # the sender of the game's own messages


@dataclass(eq=False, kw_only=True)
class TextArena(Games):
    """One game for each case. The score is the player's reward: 1 for winning, -1 for losing or an invalid move."""

    score_range: Any = "-1,1"
    players: int = 1
    seat: int = 0
    opponent: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reply: Opponent = any_legal if self.opponent is None else load_function("opponent", self.opponent)
        self.source_files = source_files((), [self.reply], "textarena")
        if self.seat not in range(self.players):
            raise ConfigError(f"rl_env_config: seat must be from 0 to {self.players - 1}, not {self.seat}")
        self.start_game(0)  # a game refuses a wrong number of players

    def episode(self, game_seed: int, seed: int) -> Generator[str, str, Score]:
        """Play until the game ends; a game that a limit ends is lost if there are other players, else worth nothing."""
        rng, is_over = random.Random(seed), False
        last_moves = dict[int, str]()  # the last text with moves that each player was shown
        env = self.start_game(game_seed)
        try:
            while not is_over:
                player, messages = env.get_observation()
                seen = [
                    str(text) if sender == GAME else f"[Player {sender}] {text}"
                    for sender, text, _ in messages
                    if sender != player
                ]
                if player == self.seat:
                    action = yield "\n".join(seen) or "It is your turn."
                else:
                    with_moves = [text for text in seen if MOVE.search(text)]
                    last_moves[player] = with_moves[-1] if with_moves else last_moves.get(player, "\n".join(seen))
                    action = self.reply(last_moves[player], rng)
                is_over, _ = env.step(action)
        except GeneratorExit:
            return Score(-1.0 if self.players > 1 else 0.0, {"unfinished": 1.0})
        rewards, info = env.close()
        wrong = {player for player in range(self.players) if info[player].get("invalid_move")}
        others_erred = bool(wrong - {self.seat})
        metrics = {"invalid_move": float(self.seat in wrong), "opponent_erred": float(others_erred)}
        return Score(None if others_erred else float((rewards or {}).get(self.seat, -1)), metrics)

    def start_game(self, seed: int) -> Any:
        """A new game."""
        seed_generators(seed)
        is_named = self.id.endswith(("-raw", "-train"))  # by default each observation is the whole game
        env = import_module("textarena").make(self.id if is_named else f"{self.id}-raw", **self.arguments)
        env.reset(num_players=self.players, seed=seed)
        return env
