"""The adapter of Inspect, as far as it needs no inspect-ai; tests/adapters/real/test_inspect_real.py has the rest."""

from __future__ import annotations

import pytest

from aitrain.environment.adapters.inspect import score_of
from aitrain.environment.contract import ScoreResult, parse_score


@pytest.mark.parametrize(
    ("values", "score", "metrics"),
    [
        ({"match": "I", "graded": "P"}, 0.25, {"match": 0.0, "graded": 0.5}),
        ({"rubric": {"tone": 1, "facts": "I"}, "f1": 1.0}, 0.75, {"rubric/tone": 1.0, "rubric/facts": 0.0, "f1": 1.0}),
        ({"graded": float("nan"), "match": "C"}, 1.0, {"match": 1.0}),
    ],
)
def test_the_score_is_the_mean_of_the_scorers_and_each_value_is_a_metric(
    values: dict[str, object], score: float, metrics: dict[str, float]
) -> None:
    scored = parse_score(score_of(values, {"untrained_requests": 2.0}))
    assert scored == ScoreResult(score, {**metrics, "untrained_requests": 2.0})
    with pytest.raises(ValueError, match="not a number"):
        score_of({**values, "graded": "rather good"}, {})
