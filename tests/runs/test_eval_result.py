"""The result of an eval, computed from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aitrain.runs.records import RecordedError, RolloutRecord
from aitrain.runs.result import EvalResult, with_scores
from tests.runs.scorings import only


def begun(folder: Path) -> EvalResult:
    return EvalResult(folder, {}, "Env", 7, 3, 2)


def record(row: int, sample: int, score: float | None, phase: str = "eval_sampled", **more: Any) -> RolloutRecord:
    values: dict[str, Any] = {"tokens": 4, "turns": [{"tokens": 4}], "stop": "done", **more}
    return RolloutRecord(row_number=row, sample=sample, score=score, eval_phase=phase, **values)


RECORDS = [
    record(0, 0, 1.0, metrics={"lenient": 1.0}),
    record(0, 1, 0.0, metrics={"lenient": 1.0, "other": None}, tokens=8, stop="max_tokens"),
    record(1, 0, 0.0),
    record(1, 1, None, error=RecordedError("raised", "score", "x"), stop="env_error"),
    record(2, 0, None, stop="no_room", tokens=0),
    record(2, 1, None, stop="no_room", tokens=0),
    record(0, 0, 1.0, "eval_greedy"),
    record(1, 0, None, "eval_greedy"),
]


def test_scores_are_means_over_cases_and_what_has_no_score_is_counted_apart(tmp_path: Path) -> None:
    result = with_scores(begun(tmp_path), only("012"), RECORDS)
    sampled, greedy = result.scores["sampled"], result.scores["greedy"]
    assert (sampled["mean"], sampled["count"], greedy["mean"], greedy["count"]) == (0.25, 2, 1.0, 1)
    assert (result.failures, result.unscored, result.dropped) == ({"raised": 1}, 1, 2)
    assert result.metrics == {"sampled": {"lenient": 1.0}, "greedy": {}}
    assert result.stops["sampled"] == {"done": 2, "max_tokens": 1, "env_error": 1, "no_room": 2}
    assert result.lengths["sampled"] == 20 / 6
    assert result.scores["pass@2"] == {**result.scores["pass@2"], "mean": 1.0, "count": 1}  # type: ignore[dict-item]
    result.write()
    assert EvalResult.read(tmp_path) == result


def test_scores_without_bounds_have_a_mean_and_no_pass_at_k_and_nothing_scored_is_none(tmp_path: Path) -> None:
    unbounded = [record(0, 0, -3.0), record(1, 0, 12.0), record(2, 0, 3.0)]
    result = with_scores(begun(tmp_path), only("012", None), unbounded)
    assert result.scores["sampled"]["mean"] == 4.0  # type: ignore[index]
    assert list(result.scores) == ["sampled"]
    assert with_scores(begun(tmp_path), only("012"), [record(0, 0, None)]).scores == {"sampled": None}
