"""Classes written for TRL's environment_factory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.rollout_session import session_for
from tests.adapters.conftest import cases_of, made, play, refusal
from tests.conftest import json_lines, write
from tests.rehearsal import call

CLASSES = '''
class Counter:
    def reset(self, target, **row):
        self.value, self.target = 0, target
        return f"Count to {target}."

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: How much to add.
        """
        if by < 0:
            raise ValueError("only upwards")
        self.value += by
        return self.value

    def get_reward(self):
        return 1.0 - abs(self.value - self.target) / self.target

    def _private(self): ...


class Dice:
    async def reset(self, **row):
        self.rolls = []

    async def roll(self, sides: int = 6) -> int:
        """Roll a die."""
        self.rolls.append(sides)
        return 4


class Riddle:
    def reset(self, **row):
        return "Say yes."

    def get_reward(self):
        return 0.5


def rolled(completions, environments, **kwargs):
    results = [sum(message["role"] == "tool" for message in said) for said in completions]
    return [float(min(len(one.rolls), count)) for one, count in zip(environments, results)]


def polite(completions, **kwargs):
    return [float("please" in one[-1]["content"]) for one in completions]


def short(completions, completion_ids, **kwargs):
    return [1 / len(ids) for ids in completion_ids]
'''


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Use the tool."}], "target": 2}]
    rows += [{"prompt": "Use the tool.", "target": 4}]
    write(here, {"my_envs.py": CLASSES, "rows.jsonl": json_lines(rows)})


def counter(**settings: Any) -> Any:
    return made("trl:my_envs.py:Counter", **{"data": "rows.jsonl", "score_range": "any", **settings})


def test_public_methods_are_the_tools_of_one_episode_and_get_reward_is_the_score() -> None:
    env = counter()
    case = cases_of(env)[1]
    (tool,) = session_for(env).open(case.arguments(seed=0)).tools
    assert tool["function"]["name"] == "increment"
    add = [call("increment", by=number) for number in (1, 2, -1)]
    said, result = play(env, case, [*add, "done"])
    assert said == ["Use the tool.Count to 4.", "1", "3", '{"error": "only upwards"}']
    assert (result.score, result.metrics) == (0.75, {"Counter": 0.75})
    assert play(env, case, [add[0], "done"])[1].score == 0.25  # another instance
    assert "Did you mean Counter?" in refusal("trl:my_envs.py:Countr", score_range="0,1")


def test_reward_functions_get_the_instance_and_async_methods_are_awaited() -> None:
    env = made(
        "trl:my_envs.py:Dice",
        data="rows.jsonl", rewards="my_envs.py:rolled,polite", weights=[1, 0.5], score_range="0,9",
    )  # fmt: skip
    _, result = play(env, cases_of(env)[0], [call("roll"), call("roll"), "please"])
    assert result.score == 2.5
    assert result.metrics == {"rolled": 2.0, "polite": 1.0}


def test_without_data_reset_says_what_is_asked_and_reward_functions_are_added_to_the_classs_own() -> None:
    settings = {"rewards": "my_envs.py:polite", "size": 3, "system": "Be kind.", "score_range": "0,2"}
    env = made("trl:my_envs.py:Riddle", **settings)
    cases = cases_of(env)
    assert len(cases) == 3
    assert [message["content"] for message in session_for(env).open(cases[0].arguments(seed=0)).prompt] == [
        "Be kind.", "Say yes.",
    ]  # fmt: skip
    assert play(env, cases[0], ["please"])[1].score == 1.5


def test_reward_functions_get_the_tokens_of_the_last_answer() -> None:
    env = made("trl:my_envs.py:Dice", data="rows.jsonl", rewards="my_envs.py:short", score_range="0,1")
    (case, *_), copies = cases_of(env), pickle.dumps(env.judges)  # as other ranks get what building has set
    assert play(env, case, ["abcd"])[1].score == 0.25
    assert b"short" in copies
