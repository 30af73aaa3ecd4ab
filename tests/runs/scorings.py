"""Scorings as runs record them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aitrain.environment.contract import UNIT, Bounds
from aitrain.runs.held_out import IntervalValues, ScoreTable, Scoring
from aitrain.runs.statistics import Mixture, ScoredEnv, score_table
from tests.ui.conftest import record, write_run

OPTIONS = {"model": "some/base", "rl_score_range": "0,1", "rl_temperature": 1.0}
ENVIRONMENT = {"class": "Sums", "sha256": "ab" * 32, "config": {}}


def only(cases: Iterable[str], bounds: Bounds | None = UNIT) -> Mixture:
    """The mixture of a run with one environment, whose cases have prompts of their own."""
    return (ScoredEnv(bounds=bounds, prompts={case: case for case in cases}),)


def interval(mean: float, low: float | None, high: float | None, count: int = 64) -> IntervalValues:
    """A mean with its limits."""
    return {"mean": mean, "low": low, "high": high, "count": count}


def table_of(scorings: Mapping[str, Scoring], tries: int) -> ScoreTable:
    """The table of a run with one environment."""
    return score_table(scorings, only({case for scoring in scorings.values() for case in scoring}), tries)


def episode(case: str, score: float | None, **differences: Any) -> dict[str, Any]:
    """An episode of an eval in which the model said its score; `case` is the text of the prompt."""
    prompt = [{"role": "user", "content": case}]
    said = f"this scores {score}"
    usual = {
        "step": 0, "eval_phase": "eval_sampled", "sample": 0, "row": {"answer": case}, "prompt": prompt,
        "messages": [*prompt, {"role": "assistant", "content": said}], "completion": said, "score": score,
    }  # fmt: skip
    return record(**{**usual, **differences})


def episodes(scores: Mapping[str, Sequence[float | None]], **differences: Any) -> list[dict[str, Any]]:
    """The episodes of cases with these scores of their samples; row numbers follow the order."""
    return [
        episode(case, score, row_number=row, sample=sample, **differences)
        for row, (case, samples) in enumerate(scores.items())
        for sample, score in enumerate(samples)
    ]


def write_scoring(folder: Path, records: Sequence[dict[str, Any]], **options: Any) -> Path:
    """A finished eval with these records and options."""
    write_run(folder, records)
    (folder / "config.yaml").write_text(json.dumps(OPTIONS | options))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "job": "eval"}))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "result.json").write_text(json.dumps({"job": "eval", "model": {"given": f"models/{folder.name}"}}))
    return folder
