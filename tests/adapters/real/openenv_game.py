"""An OpenEnv server made with the openenv package: a number is guessed. SESSIONS is how many it allows at once."""

from __future__ import annotations

import os
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from serving import serve


class Guess(Action):
    guess: int


class Seen(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.number, self.steps = (seed or 0) % 10, 0
        return Seen(text="A number from 0 to 9?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        self.steps += 1
        is_right = action.guess == self.number
        return Seen(text="right" if is_right else "wrong", reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    serve(create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=int(os.environ["SESSIONS"])))
