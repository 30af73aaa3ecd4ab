"""Scores of held-out cases from the scores of their samples."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aitrain.runs.held_out import bounds_of, case_means, pass_at
from aitrain.runs.mixture import mean_score
from tests.runs.scorings import only


def test_the_mean_is_that_of_the_cases_however_many_samples_each_has() -> None:
    scoring = {"1": [1.0, 1.0, 1.0], "2": [0.0], "3": []}
    assert case_means(scoring) == {"1": 1.0, "2": 0.0}
    assert mean_score(scoring, only(scoring)) == 0.5
    assert mean_score({"3": []}, only("3")) is None


def test_a_case_is_solved_at_the_highest_score() -> None:
    assert pass_at({"1": [5.0, -5.0]}, 2, (-5, 5)) == {"1": 1.0}
    assert pass_at({"1": [4.9, -5.0]}, 2, (-5, 5)) == {"1": 0.0}


@pytest.mark.parametrize(
    ("given", "bounds"),
    [(None, (0, 1)), ("any", None), ("0,1", (0, 1)), ("-1,2.5", (-1, 2.5)), (7, (0, 1))],
)
def test_the_bounds_of_scores_are_what_the_option_says(given: Any, bounds: Any) -> None:
    assert bounds_of(given) == bounds


@given(st.lists(st.sampled_from([1.0, 0.99, 0.0]), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_pass_at_is_the_closed_formula_and_the_count_of_all_choices(samples: list[float], tries: int) -> None:
    found = pass_at({"1": samples}, tries, (0, 1))
    if tries > len(samples):
        assert found == {}
        return
    failed = len(samples) - samples.count(1.0)
    none_solved = math.prod((failed - place) / (len(samples) - place) for place in range(tries))
    assert found["1"] == pytest.approx(1 - none_solved, abs=1e-12)  # 1 - C(n - c, k) / C(n, k), as a product
    choices = list(combinations(samples, tries))
    assert found["1"] == pytest.approx(sum(1.0 in chosen for chosen in choices) / len(choices))
