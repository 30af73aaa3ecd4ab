"""Gymnasium's environments, on a stand-in with its functions; `real/` has the package itself, and GEM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from aitrain import ConfigError, EnvironmentFailed
from aitrain.environment.call_policy import CallPolicy
from tests.adapters.conftest import cases_of, made, play

MAKE = """
import importlib
registry = {}

def register(id, entry_point, **config):
    registry[id] = entry_point, config

def make(id, render_mode=None, **config):
    entry_point, own = registry[id]
    module, name = entry_point.split(":")
    made = getattr(importlib.import_module(module), name)(**{**own, **config})
    made.render_mode = render_mode
    return made
"""
REGISTERED = """
from gymnasium.envs.registration import register
register(id="Walk-v1", entry_point="gymnasium.envs.walk:Walk", length=3)
register(id="Echo-v1", entry_point="gymnasium.envs.walk:Echo")
register(id="Arm-v1", entry_point="gymnasium.envs.walk:Arm")
"""
WALK = """
closed = []

class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start

class Text: ...
class MultiBinary:
    n = 2

class Walk:
    metadata = {"render_modes": ["human", "ansi"]}
    at = None
    action_space = Discrete(2)

    def __init__(self, length, price=0.25):
        self.length, self.price = length, price

    def reset(self, seed=None):
        self.at = seed % 2
        return self.at, {}

    def render(self):
        return " ".join("\\x1b[41mX\\x1b[0m" if at == self.at else "." for at in range(self.length)) + "\\n"

    def step(self, action):
        self.at = max(0, self.at + (1 if action else -1))
        is_there = self.at == self.length - 1
        return self.at, 1.0 if is_there else -self.price, is_there, False, {}

    def close(self):
        closed.append(self.at)

class Echo:
    metadata = {}
    action_space = Text()

    def reset(self, seed=None):
        return f"Say {seed}.", {"suffix": "Now."}

    def step(self, action):
        return f"You said {action}.", 0.5, False, action == "stop", {}

class Arm(Echo):
    action_space = MultiBinary()
"""


@pytest.fixture(autouse=True)
def package(install: Callable[..., None]) -> None:
    files = {
        "__init__": "from gymnasium.envs.registration import make\nimport gymnasium.envs\n",
        "envs/registration": MAKE,
        "envs/__init__": REGISTERED,
        "envs/walk": WALK,
    }
    install("gymnasium", "1.2.0", {f"gymnasium/{file}.py": text for file, text in files.items()})


def walk(**settings: Any) -> Any:
    return made("gym:Walk-v1", **{"size": 2, "score_range": "any", **settings})


@pytest.mark.parametrize(
    ("settings", "case", "replies", "said", "score", "invalid"),
    [
        ({}, 0, ["forth", "forth"], ["[X] . .\n\nAnswer with one of: back, forth.", ". [X] ."], 0.75, 0.0),
        ({}, 0, ["forward", "forth", "forth"], ["", "That is no action. Answer with one of: back, forth."], 0.75, 1.0),
        ({"actions": []}, 0, ["0.5", "not 0 but 1"], ["[X] . .\n\nAnswer with a number from 0 to 1."], -0.25, 1.0),
        ({"arguments": {"length": 2, "price": 0.5}, "seed": 1}, 1, ["back", "forth"], [], 0.5, 0.0),
    ],
)
def test_answers_are_read_as_actions_and_the_score_is_the_sum_of_the_rewards(
    settings: dict[str, Any], case: int, replies: list[str], said: list[str], score: float, invalid: float
) -> None:
    env = walk(**{"actions": ["back", "forth"], **settings})
    heard, result = play(env, cases_of(env)[case], replies)
    assert all(expected in ("", text) for expected, text in zip(said, heard, strict=False))
    assert (result.score, result.metrics) == (score, {"invalid_actions": invalid})


def test_an_episode_that_a_limit_ends_keeps_its_rewards_and_the_environment_is_closed() -> None:
    env = walk(actions=["back", "forth"])
    closed = sys.modules["gymnasium.envs.walk"].closed
    closed.clear()
    assert play(env, cases_of(env)[0], ["forth"])[1].score == -0.25
    assert closed == [1]


def test_an_environment_that_reads_text_gets_the_whole_answer() -> None:
    env = made("gym:Echo-v1", size=1, score_range="0,2")
    said, result = play(env, cases_of(env)[0], ["Hello 1", "stop"])
    assert said == ["Say 0.\nNow.", "You said Hello 1."]
    assert result.score == 1.0


def test_ids_settings_and_actions_are_checked_when_it_is_made() -> None:
    with pytest.raises(EnvironmentFailed, match="argument 'lenght'"):
        walk(arguments={"lenght": 3})
    with pytest.raises(ConfigError, match="has 2 actions"):
        walk(actions=["go"])
    with pytest.raises(ConfigError, match="which no text names"):
        made("gym:Arm-v1", score_range="any")


def test_episodes_that_seed_the_global_generators_are_played_one_after_another() -> None:
    environment, told = walk(), list[str]()
    policy = CallPolicy(environment, by_episode=True, is_watched=True, notify=told.append)

    policy.run(lambda: next(environment.episode(1)))
    policy.end_episodes()

    assert policy.state() == {"mode": "serial", "copied": None}
    assert "random.seed(seed)" in told[0]
