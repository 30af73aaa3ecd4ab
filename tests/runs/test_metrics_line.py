"""A metrics line is written and read by one class."""

from __future__ import annotations

from pathlib import Path

from aitrain.runs.records import MetricsLine, read_metrics
from aitrain.runs.run_folder import append_lines, read_lines

STEP = MetricsLine(step=2, seconds=1.5, reward=0.25, values={"loss": 0.5, "env/tries": 2.0})
SCORING = MetricsLine(step=2, eval_score=0.5, eval_greedy=0.75, eval_cases=8, eval_samples=2)


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
