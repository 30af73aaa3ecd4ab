"""aitrain/envs/gsm8k.py and its two judges."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.contract import Case, ScoreResult
from aitrain.errors import EnvironmentFailed
from tests.adapters.conftest import made
from tests.rehearsal import rehearse

Load = Callable[..., Any]
ORIGINAL = Path(__file__).parent / "data" / "gsm8k_original"


def row(truth: Any = "72") -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "30 + 42?"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load("{", judge="exact")`: the environment over one row and these lines."""
    file = tmp_path / "rows.jsonl"

    def make(*lines: str, **config: Any) -> Any:
        file.write_text("\n".join([json.dumps(row()), *lines]), encoding="utf-8")
        return made("envs.gsm8k", data_path=str(file), **config)

    return make


def score(environment: Any, text: str, case_idx: int = 0) -> ScoreResult:
    case = environment.build_dataset()[case_idx]
    return rehearse(environment, [text], Case(case_idx, case["prompt"], case)).scored


# -- the judges


RIGHT = (
    ("#### 72", "72"),
    ("#### 10\n#### 1,000", "1000"),
    ("#### 72" + "x" * 294, "72"),
    ("#### **$72.00**", "72"),
    ("#### **2.** Adding up\n30 + 42 = 72", "72"),
    ("\\[ \\boxed{\\$72 \\text{ in 3 days}} \\]", "72"),
    ("It is 1\u202f000 rolls.", "1000"),
    ("72 cm^2", "72"),
    ("It is $.50", "0.5"),
    ("the result of 10-5", "5"),
)
WRONG = ("", "#### 72\n#### 10", "#### -72", "\\boxed{7}2", "72 or 73", "#### 72.5", "#### 1,72", "boxed{" * 10_000)


def test_the_lenient_judge_accepts_the_right_number_in_other_forms(load: Load) -> None:
    module = sys.modules[type(load()).__module__]
    assert all(module.lenient(text, truth) for text, truth in RIGHT)
    assert not any(module.lenient(text, "72") for text in WRONG)


# -- the environment


@pytest.mark.parametrize(("judge", "expected"), [("exact", 0.0), ("lenient", 1.0)])
def test_the_judge_is_chosen_by_name_and_the_lenient_score_stands_beside_it(
    judge: str, expected: float, load: Load
) -> None:
    scored = score(load(judge=judge), "It is 72.")
    assert (scored.score, scored.metrics) == (expected, {"lenient": 1.0})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "cannot be read"),
        ('{"question": "a"}', "not a JSON object with question and answer"),
        ('{"question": "a", "answer": "b"}', "ground_truth is 'b'"),
        (json.dumps(row("1,000")), "ground_truth is '1,000'"),
    ],
)
def test_a_row_in_another_format_is_an_error_with_its_file_and_line(load: Load, line: str, said: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        load(line)
    assert "rows.jsonl, line 2" in str(caught.value)
    assert said in str(caught.value)


def test_rows_of_the_original_are_asked_and_their_references_are_right_answers() -> None:
    environment = made("envs.gsm8k", data_path=str(ORIGINAL / "train.jsonl"), eval_path=str(ORIGINAL / "test.jsonl"))
    rows = environment.build_dataset()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["72", "1234", "-5"]
    asked = ' Let\'s think step by step and output the final answer after "####".'
    assert all(row["prompt"][0]["content"].endswith(f"?{asked}") for row in rows)
    assert len(environment.build_eval_dataset()) == 1
    references = [environment.reference(row["reward_model"]) for row in rows]
    assert [score(environment, reference, case_idx).score for case_idx, reference in enumerate(references)] == [1.0] * 3
