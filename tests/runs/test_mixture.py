"""Held-out scores of several environments: their weighted mean and its interval."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aitrain.runs.statistics import (
    ScoredEnv,
    chances,
    combined,
    mean_score,
    of_changes,
    of_means,
    score_table,
)
from tests.runs.scorings import interval, only

A = ScoredEnv("a", 0.75, (0.0, 1.0), dict(zip("1234", "wxyz", strict=True)))
B = ScoredEnv("b", 0.25, (-1.0, 1.0), dict(zip("56", "pq", strict=True)))
BEFORE = {"1": [0.0], "2": [1.0], "3": [0.0], "4": [1.0], "5": [-1.0], "6": [0.0]}
AFTER = {"1": [1.0], "2": [1.0], "3": [1.0], "4": [1.0], "5": [0.0], "6": [0.0]}


def test_the_score_is_the_weighted_mean_of_the_environments_that_have_a_scored_case() -> None:
    assert mean_score(BEFORE, (A, B)) == 0.75 * 0.5 + 0.25 * -0.5
    assert mean_score({case: BEFORE[case] for case in A.prompts}, (A, B)) == 0.5
    table = score_table({"before_sampled": BEFORE, "after_sampled": AFTER}, (A, B), 1)
    assert [name for name, row in table.items() if row["after"]] == ["sampled", "sampled, a", "sampled, b"]
    change: Any = table["sampled"]["change"]
    assert (change["mean"], change["count"]) == (pytest.approx(0.75 * 0.5 + 0.25 * 0.5), 6)


def test_the_distances_to_the_limits_are_added_as_squares_and_without_limits_there_are_none() -> None:
    unbounded = interval(3.0, None, None, 1)
    parts = [(0.6, interval(0.5, 0.3, 0.6, 8)), (0.2, interval(-0.5, -0.9, 0.0, 2)), (0.4, None)]
    both = combined(parts)
    assert (both["mean"], both["count"]) == (pytest.approx(0.25), 10)
    assert both["low"] == pytest.approx(0.25 - math.hypot(0.75 * 0.2, 0.25 * 0.4))
    assert both["high"] == pytest.approx(0.25 + math.hypot(0.75 * 0.1, 0.25 * 0.5))
    assert combined([(0.5, unbounded)]) == unbounded
    assert combined([(0.5, parts[0][1]), (0.5, unbounded)]) == interval(1.75, None, None, 9)


def test_the_p_value_weighs_each_case_as_the_mean_does() -> None:
    """Eight cases of one environment got better, and one of the other, which decides the mean, got worse."""
    many = ScoredEnv("many", 0.1, (0.0, 1.0), {f"m{n}": str(n) for n in range(8)})
    few = ScoredEnv("few", 0.9, (0.0, 1.0), {"f": "0"})
    before = dict.fromkeys(many.prompts, 0.0) | {"f": 1.0}
    after = dict.fromkeys(many.prompts, 1.0) | {"f": 0.0}
    change = of_changes(before, after, (many, few))
    assert (change["mean"], change.get("p_value")) == (pytest.approx(0.1 - 0.9), 1.0)
    alone = of_changes(before, after, (many,))
    assert (alone.get("p_value") or 0.0) < 0.05


def test_cases_with_an_equal_prompt_count_as_one_with_their_mean() -> None:
    """As before and after, so in the interval, the p-value, pass@K and the number of cases."""
    one = ScoredEnv(prompts={str(row): f"say {row // 3}" for row in range(24)})
    right = {str(row): [float(row // 3 < 4), 0.0] for row in range(24)}
    wrong = {row: [0.0, 0.0] for row in right}
    table = score_table({"before_sampled": wrong, "after_sampled": right}, (one,), 2)
    thirds = [{case: found[case] for case in list(right)[::3]} for found in (wrong, right)]
    assert table == score_table({"before_sampled": thirds[0], "after_sampled": thirds[1]}, only(thirds[0]), 2)
    assert table["pass@2"]["after"]["count"] == 8
    alike = ScoredEnv(prompts=dict.fromkeys(right, "guess"))  # what they ask is in their rows
    assert of_means(dict.fromkeys(right, 0.5), (alike,))["count"] == 24


# -- pass@K


@given(st.lists(st.sampled_from([5.0, 4.9, 1.0, -5.0]), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_pass_at_is_the_share_of_all_choices_of_samples_with_the_highest_score(
    samples: list[float], tries: int
) -> None:
    found = chances({"1": samples}, tries, only("1", (-5, 5)))
    if tries > len(samples):
        assert found == {}
        return
    choices = list(combinations(samples, tries))
    assert found["1"] == pytest.approx(sum(5.0 in chosen for chosen in choices) / len(choices))
