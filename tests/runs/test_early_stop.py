"""When a training ends by its held-out scores, and what it had taken by then."""

import pytest

from aitrain.runs.early_stop import cases_to_reach, reason_to_stop, time_to_target
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.statistics import ScoredEnv, of_mean
from tests.runs.scorings import only


def scorings(*scores: tuple[float, float | None]) -> list[MetricsLine]:
    """Evaluations after steps 10, 20 and so on, by score and lower limit."""
    return [
        MetricsLine(step=10 * n, eval_score=score, eval_low=low, trained_seconds=60.0 * n, trained_tokens=1000 * n)
        for n, (score, low) in enumerate(scores, 1)
    ]


def test_the_target_is_reached_by_the_lower_limit_and_not_by_the_score() -> None:
    seen = scorings((0.85, 0.7), (0.9, 0.8), (0.95, 0.9))
    assert time_to_target(0.8, seen[:1]) is None
    assert time_to_target(0.8, seen) == {
        "target": 0.8, "steps": 20, "seconds": 120.0, "tokens": 2000, "score": 0.9, "low": 0.8
    }  # fmt: skip
    assert time_to_target(0.1, scorings((0.9, None))) is None  # equal scores without bounds have no interval


def test_the_training_ends_by_its_newest_evaluation() -> None:
    seen = scorings((0.9, 0.82), (0.85, 0.7))
    assert reason_to_stop(0.8, None, 0.1, seen) is None
    assert "--until 0.8" in (reason_to_stop(0.8, None, 0.1, seen[:1]) or "")
    assert reason_to_stop(0.8, 1, 0.1, []) is None


@pytest.mark.parametrize(
    ("before", "scores", "since"),
    [
        (None, [], 0),
        (0.5, [0.4, 0.3], 2),
        (0.5, [0.5], 1),  # as good is not better
        (None, [0.4, 0.3], 1),
        (0.5, [0.4, 0.6, 0.6, 0.2], 2),
    ],
)
def test_patience_counts_from_the_best_score_that_of_the_initial_policy_included(
    before: float | None, scores: list[float], since: int
) -> None:
    seen = scorings(*((score, None) for score in scores))
    assert reason_to_stop(None, since + 1, before, seen) is None
    if since:
        assert f"{since} evaluations in a row" in (reason_to_stop(None, since, before, seen) or "")


def test_perfect_scores_of_fewer_cases_do_not_reach_the_target() -> None:
    assert [cases_to_reach(until, only([])) for until in (0.8, 0.95, 0.0)] == [16, 73, 1]
    assert of_mean([1.0] * 16)["low"] >= 0.8 > of_mean([1.0] * 15)["low"]  # type: ignore[index]
    assert cases_to_reach(0.95, only(map(str, range(73)))) == 0
    assert cases_to_reach(1.0, only("a")) is None
    weighted = ScoredEnv("a", 0.5, (0.0, 0.5), {"1": "x"}), ScoredEnv("b", 0.5, (-1.0, 2.0), {"2": "y"})
    assert cases_to_reach(1.2, weighted), "above 1, the highest score of most environments"
