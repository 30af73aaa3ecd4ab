"""Reward functions as TRL's trainers take them, over rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError
from aitrain.environment.dataset import dataset_note
from tests.adapters.conftest import cases_of, made, play, refusal
from tests.conftest import json_lines, write

REWARDS = """
from statistics import mean, stdev
def exact(completions, answer, **kwargs):
    return [float(one.strip() == truth) for one, truth in zip(completions, answer)]

async def short(completions, completion_ids):
    return [1 / (1 + len(ids)) for ids in completion_ids]

def never(completions, **kwargs):
    return [None for _ in completions]

def too_few(completions, **kwargs):
    return [1.0, 1.0]

def longest(prompts, completions, log_metric=None, **kwargs):
    lengths = [len(one) for one in completions]
    for length in lengths if log_metric else (): log_metric("mean_length", length)
    return [float(length == max(lengths) and length > min(lengths)) for length in lengths]


def standard(completions, **kwargs):
    lengths = [len(one) for one in completions]
    return [(length - mean(lengths)) / (stdev(lengths) or 1) for length in lengths]

def boxed(completions, **kwargs):
    found = [one.rpartition("boxed{")[2].partition("}")[0] if "boxed{" in one else None for one in completions]
    return [0.0 if one is None else 1 / found.count(one) for one in found]

def letter(completions, **kwargs):
    found = [one if one in ("A", "B", "C", "D") else None for one in completions]
    return [0.0 if one is None else 1 / found.count(one) for one in found]

def shortest_right(completions, solution, **kwargs):
    lengths = [len(one) for one, truth in zip(completions, solution) if truth in one]
    return [float(truth in one and len(one) == min(lengths)) for one, truth in zip(completions, solution)]

def number(completions):
    return [int(one) for one in completions]
"""
ROWS = [{"prompt": f"Say {word}: ", "answer": word} for word in ("yes", "no", "maybe")]


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    solutions = json.dumps({"prompt": "Which ocean is the largest? ", "solution": "Pacific"})
    other = "def exact(completions): return [10] * len(completions)"
    write(
        here,
        {
            "my_rewards.py": REWARDS,
            "rows.jsonl": json_lines(ROWS),
            "solutions.jsonl": solutions,
            "other/my_rewards.py": other,
        },
    )


def environment(id: str, **settings: Any) -> Any:
    return made(f"reward:{id}", **{"data": "rows.jsonl", "score_range": "any", **settings})


@pytest.mark.parametrize(
    ("functions", "settings", "score", "metrics"),
    [
        ("exact,short", {"weights": [2, 0.5]}, 2.125, {"exact": 1.0, "short": 0.25}),
        ("exact,other/my_rewards.py:exact", {}, 11.0, {"exact": 1.0, "exact_1": 10.0}),
        ("exact,never", {}, 1.0, {"exact": 1.0}),
        ("never", {}, None, {}),
    ],
)
def test_the_score_is_the_weighted_sum_and_each_function_is_a_metric(
    functions: str, settings: dict[str, Any], score: float | None, metrics: dict[str, float]
) -> None:
    env = environment(f"my_rewards.py:{functions}", **settings)
    result = play(env, cases_of(env)[0], ["yes"])[1]
    assert (result.score, result.metrics, result.failure) == (score, metrics, None)


def test_a_function_of_trl_gets_messages_for_a_chat_prompt_and_one_reward_for_each_is_needed() -> None:
    write(Path.cwd(), {"chat.jsonl": json.dumps({"question": "Say yes.", "answer": "yes"})})
    env = environment("trl.rewards:think_format_reward", data="chat.jsonl")
    case = cases_of(env)[0]
    assert play(env, case, ["yes"])[1].score == 0.0
    assert play(env, case, ["<think>yes?</think>\nyes"])[1].score == 1.0
    wrong = environment("my_rewards.py:too_few", group=[])
    failure = play(wrong, cases_of(wrong)[0], ["yes"])[1].failure
    assert "too_few returned 2 rewards for 1 completions" in failure.message


# -- functions that compare the answers of a group


def test_a_function_that_compares_answers_gets_the_whole_group() -> None:
    env = environment("my_rewards.py:exact,longest")
    case = cases_of(env)[0]
    replies = ["yes", "yes, of course"]
    alone = [play(env, case, [reply])[1] for reply in replies]
    assert [result.score for result in alone] == [1.0, 0.0]
    together = env.score_group(
        completions=replies,
        texts=replies,
        scores=[one.score for one in alone],
        metrics=[one.metrics for one in alone],
        case=dict(case.row),
    )
    assert [score.score for score in together] == [1.0, 1.0]
    assert [score.metrics["longest"] for score in together] == [0.0, 1.0]
    assert together[0].metrics["longest/mean_length"] == (3 + 14) / 2


@pytest.mark.parametrize(
    ("name", "settings", "comparing"),
    [
        ("exact,short", {}, []),
        ("exact,standard", {}, ["standard"]),  # which fails with one answer
        ("exact,boxed,letter", {}, ["boxed", "letter"]),  # which compare only what is in a form
        ("shortest_right", {"data": "solutions.jsonl"}, ["shortest_right"]),  # which compares only right answers
        ("number", {}, ["number"]),  # which fails with any answer of the trial
        ("exact,longest", {"group": ["exact"]}, ["exact"]),
    ],
)
def test_functions_that_compare_are_named_or_found_by_a_trial(
    name: str, settings: dict[str, Any], comparing: list[str]
) -> None:
    env = environment(f"my_rewards.py:{name}", **settings)
    assert env.score_group is not None, "groups are played whole where it is not known yet"
    cases_of(env)
    assert [one.name for one in env.score_episode if one.compares] == comparing
    assert (env.score_group is None) == (not comparing)
    assert settings or f"of a group: {', '.join(comparing) or 'none'}" in dataset_note(env)


def test_what_is_wrong_is_refused() -> None:
    assert "Did you mean exact?" in refusal("reward:my_rewards.py:exat", data="rows.jsonl", score_range="0,1")
    with pytest.raises(ConfigError, match="data must name a file"):  # a list of its keys would be asked for on the Hub
        cases_of(environment("my_rewards.py:exact", data={"train": "rows.jsonl"}))
    with pytest.raises(ConfigError, match=r"Did you mean rows\.jsonl\?"):
        cases_of(environment("my_rewards.py:exact", data="row.jsonl"))
