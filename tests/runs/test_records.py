"""Records of rollouts and metrics are each written and read by one class."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.redaction import known_forms
from aitrain.runs.json_values import JsonObject
from aitrain.runs.records import (
    LONGEST_COLUMN,
    SCHEMA,
    MetricsLine,
    RecordedError,
    RolloutRecord,
    read_metrics,
    read_rollouts,
    row_columns,
)
from aitrain.runs.run_folder import append_lines
from tests.conftest import read_lines

TOOL: JsonObject = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
PROMPT: list[JsonObject] = [{"role": "user", "content": "What is an oak?"}]
RECORD = RolloutRecord(
    step=3,
    weight_version=2,
    group=1,
    row_number=7,
    case_idx="oak",
    row={"word": "oak", "kinds": ["tree"]},
    seed=5,
    prompt=PROMPT,
    rendered_prompt="<user>What is an oak?<assistant>",
    tools=[TOOL],
    messages=[*PROMPT, {"role": "assistant", "content": "a tree", "reasoning": "kept as it is"}],
    completion="a tree",
    turns=[{"tokens": 4}, {"tokens": 3}],
    tokens=7,
    environment="sums",
    score=0.5,
    advantage=-0.25,
    metrics={"tries": 2.0},
    stop="done",
    error=RecordedError("raised", "episode", "ValueError"),
    seconds=0.125,
)


def test_a_record_that_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    scored = RolloutRecord(
        step=0, eval_phase="before_sampled", sample=1, prompt="say", discarded=2, rendered_prompt="x"
    )
    (tmp_path / "rollouts").mkdir()
    append_lines(tmp_path / "rollouts" / "rank0.jsonl", [RECORD.to_json(), scored.to_json()])
    assert list(read_rollouts(tmp_path)) == [RECORD, scored]
    assert RECORD.to_json()["schema"] == SCHEMA
    assert not {"group", "advantage"} & scored.to_json().keys()
    assert not {"eval_phase", "sample"} & RECORD.to_json().keys()


def test_the_row_is_in_json_types_without_the_prompt_secrets_and_huge_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        def __str__(self) -> str:
            return "forty-two"

    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    known_forms.cache_clear()
    row = {"prompt": "say", "answer": Answer(), "allowed": {1}, "ratio": float("nan"), "login": "me:correct-horse"}
    row["check"] = [object()]  # whose address differs in each process
    huge = {
        "document": "x" * (LONGEST_COLUMN - 1),
        "small": "x" * (LONGEST_COLUMN - 2),
        "numbers": [0] * LONGEST_COLUMN,
    }
    assert row_columns(row | huge) == {
        "answer": "forty-two", "allowed": [1], "ratio": None, "login": "me:***", "check": ["<object object>"],
        "small": "x" * (LONGEST_COLUMN - 2),
        "document": "(left out: 100,001 characters)", "numbers": "(left out: 300,000 characters)",
    }  # fmt: skip


# -- metrics

STEP = MetricsLine(2, {"seconds": 1.5, "reward": 0.25, "loss": 0.5, "env/tries": 2.0})
SCORING = MetricsLine(2, {"eval_score": 0.5, "eval_greedy": 0.75, "eval_cases": 8, "eval_samples": 2})


def test_a_line_that_is_written_is_flat_and_read_as_it_was(tmp_path: Path) -> None:
    append_lines(tmp_path / "metrics.jsonl", [STEP.to_json(), SCORING.to_json()])
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [STEP, SCORING]
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [
        {"schema": 1, "step": 2, "seconds": 1.5, "reward": 0.25, "loss": 0.5, "env/tries": 2.0},
        {"schema": 1, "step": 2, "eval_score": 0.5, "eval_greedy": 0.75, "eval_cases": 8, "eval_samples": 2},
    ]
    assert (STEP.is_scoring, SCORING.is_scoring) == (False, True)


def test_what_is_not_finite_is_null_and_stays_a_name() -> None:
    line = MetricsLine.of_logs(3, 1.0, {"loss": float("nan"), "reward": 0.5})
    assert line.to_json() == {"schema": 1, "step": 3, "seconds": 1.0, "reward": 0.5, "loss": None}
