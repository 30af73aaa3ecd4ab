"""Intervals hold what they promise: simulated, they cover the truth about as often as they say."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from aitrain.runs.statistics import of_change, of_changes, of_mean
from tests.runs.scorings import only


def test_a_mean_of_right_and_wrong_cases_has_wilsons_interval() -> None:
    found = of_mean([1.0] * 7 + [0.0] * 3)
    assert (found["mean"], found["count"]) == (0.7, 10)
    assert found["low"] == pytest.approx(0.3968, abs=1e-4)  # as tabulated for 7 of 10
    assert found["high"] == pytest.approx(0.8922, abs=1e-4)


def test_equal_scores_are_no_certainty() -> None:
    all_right, all_half = of_mean([1.0] * 19 + [1 - 1e-16]), of_mean([0.5] * 20)
    assert (all_right["low"], all_right["high"]) == (pytest.approx(0.8389, abs=1e-4), 1.0)
    assert all_half["low"] == pytest.approx(0.5 * 0.8389, abs=1e-4)
    assert all_half["high"] == pytest.approx(1 - 0.5 * 0.8389, abs=1e-4)


def test_without_bounds_there_is_students_interval_or_none() -> None:
    scores = [3.0, -2.0, 14.0, 5.0, 1.0, 0.5]
    found, half = of_mean(scores, None), 2.570582 * stdev(scores) / math.sqrt(6)
    assert found["low"] == pytest.approx(fmean(scores) - half)
    assert found["high"] > fmean(scores) + half + 0.5  # moved by the skewness
    for equal in ([4.0], [4.0] * 5):
        assert of_mean(equal, None) == {"mean": 4.0, "low": None, "high": None, "count": len(equal)}
    assert of_change([1.0, 2.0], [2.0, 3.0], None) == {"mean": 1.0, "low": None, "high": None, "count": 2}


def test_other_bounds_only_move_and_stretch_the_interval() -> None:
    bounds = low, high = -7.0, -3.0

    def there(values: list[float]) -> list[float]:
        return [low + (high - low) * value for value in values]

    scores, later = [0.1, 0.9, 0.4, 1.0, 1.0, 0.0], [0.3, 1.0, 0.4, 1.0, 0.5, 0.7]
    unit_change = of_change(scores, later)
    change = of_change(there(scores), there(later), bounds)
    assert (change["low"], change["high"]) == pytest.approx((4 * unit_change["low"], 4 * unit_change["high"]))


def test_only_cases_with_both_scores_have_a_change() -> None:
    assert of_mean([]) is None
    assert of_changes({"a": 1.0}, {"b": 1.0}, only("ab")) is None
    change = of_changes({"a": 0.0, "b": 0.5}, {"a": 1.0, "c": 0.0}, only("abc"))
    assert (change["mean"], change["count"]) == (1.0, 1)
    assert change["low"] < 1.0


def test_a_change_of_right_and_wrong_cases_has_newcombes_interval() -> None:
    """Of 50 cases 14 right before only, 2 after only, 22 both, 12 neither. By hand: shares of 0.72 (0.5833 to 0.8253)
    and 0.48 (0.3480 to 0.6149), a correlation of (22 * 12 - 14 * 2 - 25) / sqrt(36 * 14 * 24 * 26) = 0.3762."""
    before = [1.0] * 14 + [0.0] * 2 + [1.0] * 22 + [0.0] * 12
    after = [0.0] * 14 + [1.0] * 2 + [1.0] * 22 + [0.0] * 12
    change = of_change(after, before)
    assert change["mean"] == pytest.approx(0.24)
    assert change["low"] == pytest.approx(0.24 - 0.1517, abs=2e-4)
    assert change["high"] == pytest.approx(0.24 + 0.1344, abs=2e-4)
