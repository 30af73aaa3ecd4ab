"""The verdict on a change: better, worse, or no detectable difference."""

import pytest

from aitrain.runs.held_out import IntervalValues
from aitrain.runs.verdict import Verdict, verdict_of


def change(low: float | None, high: float | None, mean: float = 0.0) -> IntervalValues:
    return {"mean": mean, "low": low, "high": high, "count": 64}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.3, "better"),
        (-0.3, -0.01, "worse"),
        (-0.1, 0.1, "undetected"),
        (None, None, "undetected"),
    ],
)
def test_only_an_interval_without_zero_is_a_difference(low: float | None, high: float | None, verdict: Verdict) -> None:
    assert verdict_of(change(low, high)) == verdict


def test_a_difference_needs_a_small_p_value_where_there_is_one() -> None:
    verdicts = [verdict_of({**change(0.01, 0.3), "p_value": value}) for value in (0.05, 0.051, None)]
    assert verdicts == ["better", "undetected", "better"]
