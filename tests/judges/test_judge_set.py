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
"""
TRUTH = {"ground_truth": "72"}


@pytest.fixture(autouse=True)
def own_file(here: Path) -> None:
    write(here, {"own.py": OWN})


def judged(description: Any, text: str, **row: Any) -> Score:
    row = {**TRUTH, **row}
    return judges.load(description)(**row, text=text, prompt="ask", messages=[], case_idx=0, case=row)


# -- rules


@pytest.mark.parametrize(
    ("rule", "text", "score"),
    [
        ("exact", " 72\n", 1.0),
        ("exact", "It is 72", 0.0),
        ("boxed", r"\boxed{ 72 }", 1.0),
        ("boxed", "72", 0.0),
    ],
)
def test_a_rule_is_named(rule: str, text: str, score: float) -> None:
    assert judged(rule, text) == Score(score, {rule: score})
    assert getattr(judges, rule)(text, "72") == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("#### 72", "72", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 72 dollars", "72", 1.0),
        ("#### 72%", "72", 1.0),
        ("#### 72<|im_end|>", "72", 1.0),
        ("#### 10\n#### 72", "72", 1.0),
        ("####72", "72", 0.0),
        ("####  72", "72", 0.0),
        ("#### $72", "72", 0.0),
        ("#### 72.", "72", 0.0),
        ("#### 72.0", "72", 0.0),
        ("#### **72**", "72", 0.0),
        (r"\boxed{72}", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),
        ("#### 0072", "72", 0.0),
        ("#### 71", "72", 0.0),
        ("72", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_rows_of_gsm8k_are_judged_as_xtuner_judges_them(text: str, truth: str, score: float) -> None:
    row = {"data_source": "openai/gsm8k", "ability": "math", "reward_model": {"style": "rule", "ground_truth": truth}}
    assert judged(None, text, **row, ground_truth=truth).score == score


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"The answer is $\frac{2}{4}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        (r"\boxed{3}", r"\boxed{2}", 0.0),
        ("no number", "2", 0.0),
        ("", "2", 0.0),
    ],
)
def test_the_math_rule_compares_values(text: str, truth: str, score: float) -> None:
    assert judged("math", text, ground_truth=truth).score == score


# -- your own, several, with weights


def test_functions_of_a_file_are_called_by_signature() -> None:
    assert judged("own.py:polite", "yes please") == Score(1.0, {"polite": 1.0, "polite/prompt_length": 3.0})


def test_several_judges_are_weighted_and_each_is_a_metric() -> None:
    score = judged(["exact", {"judge": "own.py:words", "weight": 0.5, "name": "brief"}, "own.py:polite"], "72 please")
    assert score.score == 0.0 + 0.5 * 0.5 + 1.0
    assert score.metrics == {"exact": 0.0, "brief": 0.5, "polite": 1.0, "polite/prompt_length": 3.0}


def test_settings_are_arguments_of_a_function_and_of_a_class() -> None:
    assert judged({"judge": "own.py:words", "most": 2}, "72 please").score == 1.0
    assert judged({"judge": "own.py:Lasting", "least": 3}, "72").score == 0.0


def test_judges_of_one_name_are_several_metrics() -> None:
    several = [{"judge": "own.py:words", "most": most} for most in (1, 2, 4)]
    assert judged(several, "72").metrics == {"words": 1.0, "words_1": 0.5, "words_2": 0.25}


def test_a_judge_that_returns_none_is_left_out_and_alone_gives_no_score() -> None:
    assert judged(["exact", "own.py:silent"], "72") == Score(1.0, {"exact": 1.0})
    assert judged("own.py:silent", "72") == Score(None)


def test_the_range_of_the_sum_follows_from_the_judges() -> None:
    described = [{"judge": "exact", "weight": 2}, {"judge": "own.py:wide", "range": [1, 5], "weight": -0.5}]
    assert judges.load(described).score_range == (-2.5, 2.0)
    assert judges.load({"a": "exact", "b": [{"judge": "exact", "weight": 3}]}).score_range == (0.0, 3.0)
    assert judged(described, "72").score == 2.0 - 1.5


@pytest.mark.parametrize(
    ("judge", "error", "words"),
    [
        ("own.py:broken", ValueError, "no idea"),
        ("own.py:wide", CallFailed, "the judge wide returned 3, which is not from 0 to 1"),
    ],
)
def test_a_judge_that_fails_leaves_the_answer_without_a_score(judge: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        judged(["exact", judge], "72")


def test_a_judge_that_waits_is_not_left_waiting_when_another_one_fails(recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()  # what other tests left warns here
    recwarn.clear()
    with pytest.raises(ValueError, match="no idea"):
        judged(["own.py:polite", "own.py:broken"], "72")
    gc.collect()
    assert not [str(warning.message) for warning in recwarn.list]


# -- by data_source


def test_the_data_source_of_a_row_chooses() -> None:
    described = {"sums": "exact", "chat": ["own.py:polite", "own.py:words"], "*": "own.py:wide"}
    assert judged(described, "72", data_source="sums").metrics == {"exact": 1.0}
    assert judged(described, "please", data_source="chat").score == 1.25
    with pytest.raises(CallFailed, match="the judge wide"):
        judged(described, "72", data_source="other")
    with pytest.raises(CallFailed, match="the judge wide"):
        judged(described, "72")


def test_a_row_may_name_several_with_weights_as_xtuners_rows_do() -> None:
    described = {"sums": "exact", "chat": {"judge": "own.py:polite", "weight": 2}}
    score = judged(described, "72", data_source={"sums": 0.5, "chat": 0.25})
    assert score.score == 0.5
    assert judged(described, "please", data_source={"sums": 0.5, "chat": 0.25}).score == 0.5
    assert judged(described, "72", data_source={"sums": 1.0}).score == 1.0


def test_an_unknown_data_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EnvironmentFailed, match=r"the data_source sumz\. Did you mean sums\?"):
        judged({"sums": "exact"}, "72", data_source="sumz")
    with pytest.raises(EnvironmentFailed, match="rows without a data_source"):
        judged({"sums": "exact"}, "72")


# -- within a group


def compared(description: Any, texts: list[str]) -> list[Score]:
    loaded = judges.load(description)
    alone = [judged(description, text) for text in texts]
    return loaded.compare(
        texts=texts, completions=texts, messages=[[]] * len(texts), scores=[score.score for score in alone],
        metrics=[score.metrics for score in alone], case=TRUTH, case_idx=0, prompt="ask", **TRUTH,
    )  # fmt: skip


def test_a_judge_that_names_texts_compares_the_answers_of_a_group() -> None:
    assert judges.load(["exact", "own.py:longest"]).compares
    scores = compared(["exact", {"judge": "own.py:longest", "weight": 0.5}], ["72", "what?"])
    assert scores == [Score(1.0, {"exact": 1.0, "longest": 0.0}), Score(0.5, {"exact": 0.0, "longest": 1.0})]
    assert [score.score for score in compared("own.py:longest", ["a", "bb"])] == [0.0, 1.0]


def test_an_answer_that_failed_is_not_compared() -> None:
    loaded = judges.load(["exact", "own.py:longest"])
    scores = loaded.compare(["72", "a long failure"], [{"exact": 1.0}, {}], scores=[1.0, None], case=TRUTH)
    assert scores == [Score(2.0, {"exact": 1.0, "longest": 1.0}), Score(None)]


def test_a_comparison_must_have_a_score_for_each_answer() -> None:
    with pytest.raises(CallFailed, match=r"too_few returned .* a list with 2 scores"):
        compared("own.py:too_few", ["a", "b"])


# -- in an environment


def test_judges_must_not_be_called_on_the_loop_that_they_wait_for() -> None:
    from aitrain.execution.async_calls import run_async

    async def score() -> Score:
        return judged("exact", "72")

    with pytest.raises(RuntimeError, match="`def`, not `async def`"):
        run_async(score())


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("exakt", "there is no judge exakt. Did you mean exact?"),
        ("own.py:polit", "there is no judge polit in own.py. Did you mean polite?"),
        ("own_.py:polite", "there is no file own_.py"),
        ([], "the list of judges is empty"),
        ({"sums": []}, "the list of judges is empty"),
        (3, "'3' is no judge"),
        ({"judge": "exact", "window": 3}, "the rule exact has no settings"),
        ({"judge": "exact", "weight": "1"}, "the weight of exact must be a number"),
        ({"judge": "exact", "range": [1, 0]}, "the range of exact must be"),
        ({"judge": "rubric"}, "also needs url, model, rubric"),
        ("rubric", "also needs url, model, rubric"),
    ],
)
def test_a_wrong_description_is_refused_without_running_the_file(here: Path, description: Any, words: str) -> None:
    from aitrain.environment.judges.judged_rows import check_id

    write(here, {"own.py": OWN + "open('somebody_ran_this', 'w').close()\n", "rows.jsonl": ""})
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        check_id("rows.jsonl", {"judges": description})
    assert len(str(caught.value).splitlines()) <= 5
    assert not Path("somebody_ran_this").exists()
