"""Rules, weights, and the choice of judges by `data_source`."""

from __future__ import annotations

import gc
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, EnvironmentFailed, Score, judges
from aitrain.execution.failure import CallFailed
from tests.conftest import write

OWN = """
import asyncio

def words(text, most=4):
    return len(text.split()) / most

async def polite(text, prompt):
    await asyncio.sleep(0)
    return {"score": float("please" in text), "prompt_length": len(prompt)}

def silent(text):
    return None

def broken(text):
    raise ValueError("no idea")

def wide(text):
    return 3.0

class Lasting:
    def __init__(self, least):
        self.least = least
    def __call__(self, text):
        return float(len(text) >= self.least)

def longest(texts, **everything):
    most = max(map(len, texts))
    return [float(len(text) == most) for text in texts]

def too_few(texts):
    return [1.0]

import functools
half = functools.partial(words, most=8)
"""
TRUTH = {"ground_truth": "72"}
NEEDS_MATH_VERIFY = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
BRIEF = {"judge": "own.py:words", "weight": 0.5, "name": "brief"}


@pytest.fixture(autouse=True)
def own_file(here: Path) -> None:
    write(here, {"own.py": OWN})


def judged(description: Any, text: str, **row: Any) -> Score:
    row = {**TRUTH, **row}
    return judges.load(description)(**row, text=text, prompt="ask", messages=[], case_idx=0, case=row)


@pytest.mark.parametrize(
    ("rule", "text", "truth", "score"),
    [
        ("exact", " 72\n", "72", 1.0),
        ("exact", "It is 72", "72", 0.0),
        ("gsm8k", "#### 72 dollars", "72", 1.0),
        ("gsm8k", "#### 1,000", "1000", 1.0),
        ("gsm8k", "#### 10\n#### 72", "72", 1.0),
        ("gsm8k", "#### 72" + " " * 294, "72", 0.0),
        ("gsm8k", "####72", "72", 0.0),
        ("boxed", r"\boxed{5} or \boxed{ 72 }", "72", 1.0),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1} {2}", 1.0),
        pytest.param("math", r"The answer is $\frac{2}{4}$", r"\frac{1}{2}", 1.0, marks=NEEDS_MATH_VERIFY),
        pytest.param("math", r"\boxed{3}", r"\boxed{2}", 0.0, marks=NEEDS_MATH_VERIFY),
    ],
)
def test_a_rule_reads_the_marked_answer_and_nothing_else(rule: str, text: str, truth: str, score: float) -> None:
    assert judged(rule, text, ground_truth=truth) == Score(score, {rule: score})


@pytest.mark.parametrize(
    ("description", "text", "score"),
    [
        ("own.py:polite", "yes please", Score(1.0, {"polite": 1.0, "polite/prompt_length": 3.0})),
        (["exact", BRIEF], "72", Score(1.125, {"exact": 1.0, "brief": 0.25})),
        ({"judge": "own.py:Lasting", "least": 3}, "72", Score(0.0, {"Lasting": 0.0})),
        (["own.py:words", {"judge": "own.py:words", "most": 1}], "72", Score(1.25, {"words": 0.25, "words_1": 1.0})),
        (["exact", "own.py:silent"], "72", Score(1.0, {"exact": 1.0})),
        ("own.py:silent", "72", Score(None)),
        ("own.py:half", "72", Score(0.125, {"half": 0.125})),
    ],
)
def test_the_score_is_the_weighted_sum_and_each_judge_a_metric(description: Any, text: str, score: Score) -> None:
    assert judged(description, text) == score


def test_the_range_of_the_sum_follows_from_the_judges() -> None:
    described = [{"judge": "exact", "weight": 2}, {"judge": "own.py:wide", "range": [1, 5], "weight": -0.5}]
    assert judges.load({"a": "exact", "b": described}).score_range == (-2.5, 2.0)
    assert judged(described, "72").score == 2.0 - 1.5


def test_a_judge_that_fails_leaves_the_answer_without_a_score(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(CallFailed, match="the judge wide returned 3, which is not from 0 to 1"):
        judged(["exact", "own.py:wide"], "72")
    gc.collect()  # what other tests left warns here
    recwarn.clear()
    with pytest.raises(ValueError, match="no idea"):
        judged(["own.py:polite", "own.py:broken"], "72")
    gc.collect()
    assert not [str(warning.message) for warning in recwarn.list]  # polite was not left waiting


# -- by data_source


@pytest.mark.parametrize(
    ("row", "text", "score"),
    [
        ({"data_source": "sums"}, "72", 1.0),
        ({"data_source": "chat"}, "please", 2.25),
        ({}, "a b", 0.25),
        ({"data_source": {"sums": 0.5, "chat": 0.25}}, "please", 0.5625),
        ({"data_source": {"sums": 0.5, "same name": 1.0}}, "72", 0.75),
    ],
)
def test_the_data_source_of_a_row_chooses_one_or_several_with_weights(
    row: dict[str, Any], text: str, score: float
) -> None:
    chat, named = [{"judge": "own.py:polite", "weight": 2}, "own.py:words"], {"judge": "own.py:words", "name": "exact"}
    described = {"sums": "exact", "chat": chat, "same name": named, "*": BRIEF}
    assert judged(described, text, **row).score == score


def test_an_unknown_data_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EnvironmentFailed, match=r"Did you mean sums\?"):
        judged({"sums": "exact"}, "72", data_source="sumz")
    with pytest.raises(EnvironmentFailed, match="rows without a data_source"):
        judged({"sums": "exact"}, "72")


# -- within a group


def test_a_judge_that_names_texts_compares_the_answers_of_a_group_without_those_that_failed() -> None:
    loaded = judges.load(["exact", {"judge": "own.py:longest", "weight": 0.5}])
    assert loaded.compares
    texts, metrics = ["72", "what?", "a long failure"], [{"exact": 1.0}, {"exact": 0.0}, {}]
    scores = loaded.compare(texts=texts, metrics=metrics, scores=[1.0, 0.0, None], case=TRUTH)
    assert scores[:2] == [Score(1.0, {"exact": 1.0, "longest": 0.0}), Score(0.5, {"exact": 0.0, "longest": 1.0})]
    assert scores[2] == Score(None)
    with pytest.raises(CallFailed, match="a list with 2 scores"):
        judges.load("own.py:too_few").compare(texts=["a", "b"], metrics=[{}, {}], scores=[None] * 2, case=TRUTH)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("exakt", "Did you mean exact?"),
        ("own.py:polit", "Did you mean polite?"),
        ({"judge": "exact", "range": [1, 0]}, "the range of exact must be"),
        ({}, "'{}' is no judge"),
    ],
)
def test_a_wrong_description_is_refused(description: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        judges.load(description)


@pytest.mark.parametrize("place", ["exact", "own.py:words", "own.py:Lasting", "rubric", "http://127.0.0.1:9"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"weight": "high"}, "must be a number, not 'high'"),
        ({"weight": True}, "must be a number, not True"),
        ({"weight": float("nan")}, "must be a number, not nan"),
        ({"weigth": 2}, "Did you mean weight"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_answer_is_judged(
    place: str, setting: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        judges.load({"judge": place, **setting})
