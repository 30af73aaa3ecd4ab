"""Gymnasium's and GEM's environments, on stand-ins with their functions; `real/` has the packages themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError
from tests.adapters.conftest import cases_of, made, play, refusal, source_of
from tests.conftest import write

MAKE = """
import importlib
KNOWN = {}

def register(id, entry_point, **config):
    KNOWN[id] = entry_point, config

def make(id, render_mode=None, **config):
    entry_point, own = KNOWN[id]
    module, name = entry_point.split(":")
    made = getattr(importlib.import_module(module), name)(**{**own, **config})
    made.render_mode = render_mode
    return made
"""
REGISTERED = """
from gymnasium.registration import register
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
class Box: ...

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
    action_space = Box()
"""


@pytest.fixture(autouse=True)
def packages(install: Callable[..., None]) -> None:
    for distribution, name in (("gymnasium", "gymnasium"), ("gem-llm", "gem")):
        files = {"__init__": f"from {name}.registration import make\nimport {name}.envs\n", "registration": MAKE}
        files |= {"envs/__init__": REGISTERED, "envs/walk": WALK}
        version = "1.2.0" if name == "gymnasium" else "0.1.0"
        texts = {f"{name}/{file}.py": text.replace("gymnasium", name) for file, text in files.items()}
        if name == "gem":
            texts["gem/envs/__init__.py"] = (
                'from gem.registration import register\nregister("game:Echo-v0", "gem.envs.walk:Echo")\n'
                'for word in ("sums", "words"):\n    register(f"rg:{word}", "gem.envs.walk:Echo")\n'
            )
        install(distribution, version, texts)


def walk(**settings: Any) -> Any:
    return made("gym:Walk-v1", **{"size": 2, "score_range": "any", **settings})


def test_the_environment_speaks_first_with_its_map_and_how_to_act() -> None:
    env = walk(actions=["back", "forth"])
    said, _ = play(env, cases_of(env)[0], ["forth"])
    assert said == ["[X] . .\n\nAnswer with one of: back, forth.", ". [X] ."]


def test_its_source_is_the_users_modules_or_the_package_with_its_version(here: Path) -> None:
    own = "from gymnasium.envs.walk import Walk\nfrom gymnasium.registration import register\n\nclass Run(Walk): ...\n"
    write(here, {"runs.py": own + "\nregister('Run-v1', 'runs:Run', length=3)\n"})
    assert source_of(walk()) == {"class": "gym:Walk-v1", "package": "gymnasium 1.2.0", "files": []}
    run = made("gym:Run-v1", imports=["runs"], score_range="any")
    assert source_of(run) == {"class": "gym:Run-v1", "package": "gymnasium 1.2.0", "files": ["runs.py"]}
    game = made("gem:game:Echo-v0", score_range="any")
    assert source_of(game) == {"class": "gem:game:Echo-v0", "package": "gem-llm 0.1.0", "files": []}


def test_each_case_is_a_seed_and_the_score_is_the_sum_of_the_rewards() -> None:
    env = walk(actions=["back", "forth"])
    first, second = cases_of(env)
    assert play(env, first, ["forth", "forth"])[1].score == 0.75
    assert play(env, second, ["forth"])[1].score == 1.0
    assert play(env, second, ["back", "forth", "I go FORTH!"])[1].score == 0.5


def test_settings_of_the_environment_are_passed_on() -> None:
    env = walk(length=2, price=0.5, seed=2)
    assert play(env, cases_of(env)[0], ["0", "1"])[1].score == 0.5


def test_actions_are_numbers_without_words_and_the_last_one_counts() -> None:
    env = walk()
    said, result = play(env, cases_of(env)[0], ["not 0 but 1"])
    assert said[0].endswith("Answer with a number from 0 to 1.")
    assert said[1] == ". [X] ."
    assert result.score == -0.25


def test_a_longer_action_is_not_taken_for_the_one_it_begins_with() -> None:
    env = walk(actions=["go", "go forth"])
    assert play(env, cases_of(env)[0], ["I go forth."])[0][1] == ". [X] ."


@pytest.mark.parametrize("reply", ["1.0", "0.5", "-1"])
def test_other_numbers_are_no_actions(reply: str) -> None:
    env = walk()
    assert "That is no action" in play(env, cases_of(env)[0], [reply])[0][1]


@pytest.mark.parametrize("reply", ["", "forward", "backforth", "12"])
def test_an_answer_without_an_action_is_told_and_counted_and_changes_nothing(reply: str) -> None:
    env = walk(actions=["back", "forth"])
    said, result = play(env, cases_of(env)[0], [reply, "forth", "forth"])
    assert said[1] == "That is no action. Answer with one of: back, forth."
    assert result.score == 0.75
    assert result.metrics == {"invalid_actions": 1.0}


def test_the_third_answer_without_an_action_ends_the_episode() -> None:
    env = walk()
    said, result = play(env, cases_of(env)[0], ["1", "a", "b", "c", "1"])
    assert len(said) == 4
    assert (result.score, result.metrics) == (-0.25, {"invalid_actions": 3.0})


def test_an_episode_that_a_limit_ends_keeps_its_rewards_and_the_environment_is_closed() -> None:
    env = walk(actions=["back", "forth"])
    closed = sys.modules["gymnasium.envs.walk"].closed
    closed.clear()
    assert play(env, cases_of(env)[0], ["forth"])[1].score == -0.25
    assert closed == [1]
    play(env, cases_of(env)[0], ["forth", "forth"])
    assert closed == [1, 2]


def test_an_environment_that_reads_text_gets_the_whole_answer() -> None:
    env = made("gym:Echo-v1", size=1, score_range="0,2")
    said, result = play(env, cases_of(env)[0], ["Hello 1", "stop"])
    assert said == ["Say 0.\nNow.", "You said Hello 1."]
    assert result.score == 1.0


def test_gem_is_named_by_its_own_ids() -> None:
    for id in ("game:Echo-v0", "rg:words"):
        env = made(f"gem:{id}", size=1, score_range="0,2")
        assert play(env, cases_of(env)[0], ["stop"])[0] == ["Say 0.\nNow."]


@pytest.mark.parametrize(
    ("rl_env", "settings", "words"),
    [
        ("gym:Wakl-v1", {}, ["gymnasium has no environment Wakl-v1", "Did you mean Walk-v1?"]),
        ("gym:Walk-v1", {"lenght": 3}, ["Walk-v1 does not take lenght", "Did you mean length?"]),
        ("gem:game:Ecko-v0", {}, ["gem has no environment game:Ecko-v0", "Did you mean game:Echo-v0?"]),
    ],
)
def test_ids_and_settings_are_checked_without_importing_the_package(
    rl_env: str, settings: dict[str, Any], words: list[str]
) -> None:
    message = refusal(rl_env, **settings)
    assert all(word in message for word in words), message
    assert {"gymnasium", "gem"}.isdisjoint(sys.modules)


@pytest.mark.parametrize(
    ("id", "settings", "words"),
    [
        ("Walk-v1", {}, "set score_range"),
        ("Walk-v1", {"score_range": "any", "actions": ["go"]}, "Walk-v1 has 2 actions, and `actions` names 1"),
        ("Arm-v1", {"score_range": "any"}, "which no text names"),
    ],
)
def test_what_only_the_environment_can_tell_is_refused_when_it_is_made(
    id: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        made(f"gym:{id}", **settings)
