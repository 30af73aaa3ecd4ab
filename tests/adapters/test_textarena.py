"""TextArena's games, on a stand-in with its functions; `real/` has the package itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.environment_source import kept_files, source_facts
from tests.adapters.conftest import cases_of, made, play
from tests.conftest import write
from tests.rollout.scripted import Scripted, play_with_notes

REGISTRATION = """
import importlib
ENV_REGISTRY = {}

def register_with_versions(id, entry_point, wrappers, **config):
    for ending in ("", "-raw", "-train"):
        ENV_REGISTRY[id + ending] = entry_point, config

def make(id, **config):
    entry_point, own = ENV_REGISTRY[id]
    module, name = entry_point.split(":")
    game = getattr(importlib.import_module(module), name)(**{**own, **config})
    game.id = id
    return game
"""
REGISTERED = """
from textarena.envs.registration import register_with_versions
register_with_versions(id="Guess-v0", entry_point="textarena.envs.guess:Guess", wrappers={}, highest=9)
register_with_versions(id="Last-v0", entry_point="textarena.envs.last:Last", wrappers={})
"""
GUESS = """
import random

class Guess:
    def __init__(self, highest, max_turns=3):
        self.highest, self.left = highest, max_turns

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.number, self.reward, self.invalid = random.randint(1, self.highest), None, False
        self.said = [(-1, f"{self.id}: guess from 1 to {self.highest}, as in [3].", 0)]

    def get_observation(self):
        said, self.said = self.said, []
        return 0, said

    def step(self, action):
        self.left -= 1
        self.said = [(0, action, 0), (-1, f"no, {random.randint(0, 10**9)}", 0)]
        if action == f"[{self.number}]":
            self.reward = 1.0
        elif "[" not in action:
            self.reward, self.invalid = -1.0, True
        elif not self.left:
            self.reward = 0.25
        return self.reward is not None, {}

    def close(self):
        return {0: self.reward}, {0: {"invalid_move": self.invalid}}
"""
LAST = """
class Last:
    "Two players take 1 or 2 of 4; who takes the last one wins."

    def reset(self, num_players, seed=None):
        assert num_players == 2
        self.left, self.player, self.rewards, self.wrong = 4, 0, None, None
        self.said = {0: [(-1, "You begin.", 0)], 1: [(-1, "You are second.", 0)]}
        self.show()

    def show(self):
        for said in self.said.values():
            said.append((-1, f"{self.left} left: " + " ".join(f"[{n}]" for n in (1, 2) if n <= self.left), 0))

    def get_observation(self):
        said, self.said[self.player] = self.said[self.player], []
        return self.player, said

    def step(self, action):
        me = self.player
        for said in self.said.values():
            said.append((me, action, 0))
        if action.strip("[]") not in ("1", "2") or int(action.strip("[]")) > self.left:
            self.rewards, self.wrong = {me: -1, 1 - me: 1}, me
            return True, {}
        self.left -= int(action.strip("[]"))
        self.player = 1 - me
        if not self.left:
            self.rewards = {me: 1, 1 - me: -1}
        self.show()
        return not self.left, {}

    def close(self):
        return self.rewards, {player: {"invalid_move": player == self.wrong} for player in (0, 1)}
"""


@pytest.fixture(autouse=True)
def package(install: Callable[..., None]) -> None:
    init = "from textarena.envs.registration import make\nimport textarena.envs\n"
    install(
        "textarena", "0.7.4",
        {"textarena/__init__.py": init, "textarena/envs/registration.py": REGISTRATION,
         "textarena/envs/__init__.py": REGISTERED, "textarena/envs/guess.py": GUESS, "textarena/envs/last.py": LAST},
    )  # fmt: skip


def guesses(*numbers: int) -> list[str]:
    return [f"[{number}]" for number in numbers]


@pytest.mark.parametrize(
    ("settings", "replies", "score", "metrics"),
    [
        ({"arguments": {"max_turns": 9}}, guesses(*range(1, 10)), 1.0, {"invalid_move": 0.0, "opponent_erred": 0.0}),
        ({}, ["nothing"], -1.0, {"invalid_move": 1.0, "opponent_erred": 0.0}),
        ({}, guesses(10), 0.0, {"unfinished": 1.0}),
    ],
)
def test_the_players_reward_is_the_score(
    settings: dict[str, Any], replies: list[str], score: float, metrics: dict[str, float]
) -> None:
    env = made("textarena:Guess-v0", size=2, **settings)
    result = play(env, cases_of(env)[0], replies)[1]
    assert (result.score, result.metrics) == (score, metrics)


def test_games_in_threads_are_played_one_after_another_each_with_its_own_random_numbers() -> None:
    env = made("textarena:Guess-v0", size=3)
    cases = list(cases_of(env))
    alone = play(env, cases[2], guesses(10, 10, 10))[0]
    episodes, told = play_with_notes(env, Scripted(lambda _: "[10]$"), of=cases, rl_score_range="-1,1")
    said = [message["content"] for message in episodes[2].messages if message["role"] != "assistant"]
    assert said == alone[1:]
    assert "one after another" in "".join(told)


@pytest.mark.parametrize(
    ("seat", "replies", "score"),
    [(0, (1, 2), 1.0), (0, (1, 1), -1.0), (1, (1, 1), 1.0)],
)
def test_the_policy_plays_on_its_seat_against_the_others(seat: int, replies: tuple[int, ...], score: float) -> None:
    write(Path.cwd(), {"players.py": "def first(seen, rng):\n    return seen[seen.rindex('left') :].split()[1]\n"})
    env = made("textarena:Last-v0", size=2, players=2, seat=seat, opponent="players.py:first")
    case = cases_of(env)[0]
    said, result = play(env, case, guesses(*replies))
    assert said[0].startswith(["You begin.", "You are second.\n4 left: [1] [2]\n[Player 0] [1]"][seat])
    assert result.score == score


def test_an_opponent_that_errs_leaves_the_episode_unscored() -> None:
    write(Path.cwd(), {"players.py": "def wild(seen, rng):\n    return '[7]'\n"})
    env = made("textarena:Last-v0", size=2, players=2, opponent="players.py:wild")
    assert source_facts(env)["package"] == "textarena 0.7.4"
    assert [file["name"] for file in kept_files(env)] == ["players.py"]
    result = play(env, cases_of(env)[0], guesses(1))[1]
    assert (result.score, result.failure) == (None, None)
    assert result.metrics["opponent_erred"] == 1.0
