"""Intervals hold what they promise: simulated, they cover the truth about as often as they say."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from aitrain.report.intervals import of_change, of_mean


def test_a_mean_has_wilsons_interval() -> None:
    found = of_mean([1.0] * 7 + [0.0] * 3)
    assert found is not None
    assert (found.mean, found.count) == (0.7, 10)
    assert found.low == pytest.approx(0.3968, abs=1e-4)  # as tabulated for 7 of 10
    assert found.high == pytest.approx(0.8922, abs=1e-4)


def test_equal_scores_are_no_certainty() -> None:
    all_right = of_mean([1.0] * 20)
    assert all_right is not None
    assert all_right.low == pytest.approx(0.8389, abs=1e-4)
    assert all_right.high == 1.0


def test_nothing_has_no_mean_and_no_change() -> None:
    assert of_mean([]) is None
    assert of_change({"a": 1.0}, {"b": 1.0}) is None


def test_only_cases_with_both_scores_have_a_change() -> None:
    change = of_change({"a": 0.0, "b": 0.5}, {"a": 1.0, "c": 0.0})
    assert change is not None
    assert (change.mean, change.count) == (1.0, 1)
    assert change.low < 1.0


@pytest.mark.parametrize("count", [10, 50, 200])
@pytest.mark.parametrize(("before", "after"), [(0.5, 0.5), (0.2, 0.9), (0.05, 0.1)])
def test_intervals_cover_the_truth_as_often_as_they_say(count: int, before: float, after: float) -> None:
    """Cases that are right before and after with these chances, drawn anew 2,000 times."""
    rng = random.Random(1)
    covered_mean = covered_change = 0
    for _ in range(2000):
        first = {str(case): float(rng.random() < before) for case in range(count)}
        second = {str(case): float(rng.random() < after) for case in range(count)}
        mean, change = of_mean(second.values()), of_change(first, second)
        assert mean is not None
        assert change is not None
        assert mean.low <= fmean(second.values()) <= mean.high
        covered_mean += mean.low <= after <= mean.high
        covered_change += change.low <= after - before <= change.high
    assert covered_mean >= 0.92 * 2000
    assert covered_change >= 0.93 * 2000
