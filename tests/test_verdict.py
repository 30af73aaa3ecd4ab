"""The verdict on a change; that it is the interval's is in runs/test_comparison.py."""

from aitrain.runs.held_out import verdict_of
from tests.runs.scorings import interval


def test_a_difference_needs_a_small_p_value_where_there_is_one() -> None:
    verdicts = [verdict_of({**interval(0.1, 0.01, 0.3), "p_value": value}) for value in (0.05, 0.051, None)]
    assert verdicts == ["better", "undetected", "better"]
    assert verdict_of(interval(0.0, None, None)) == "undetected"
