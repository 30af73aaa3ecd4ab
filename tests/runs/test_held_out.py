"""Scores of held-out cases from the scores of their samples."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aitrain.runs.held_out import UNIT, Bounds, bounds_of
from aitrain.runs.statistics import ScoredEnv, chances


def pass_at(scores: list[float], tries: int, bounds: Bounds = UNIT) -> dict[str, float]:
    return chances({"1": scores}, tries, (ScoredEnv(bounds=bounds, prompts={"1": "say"}),))


def test_a_case_is_solved_at_the_highest_score() -> None:
    assert pass_at([5.0, -5.0], 2, (-5, 5)) == {"1": 1.0}
    assert pass_at([4.9, -5.0], 2, (-5, 5)) == {"1": 0.0}


@pytest.mark.parametrize(
    ("given", "bounds"),
    [(None, (0, 1)), ("any", None), ("0,1", (0, 1)), ("-1,2.5", (-1, 2.5)), (7, (0, 1))],
)
def test_the_bounds_of_scores_are_what_the_option_says(given: Any, bounds: Any) -> None:
    assert bounds_of(given) == bounds


@given(st.lists(st.sampled_from([1.0, 0.99, 0.0]), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_pass_at_is_the_share_of_all_choices_of_samples_that_solve_it(samples: list[float], tries: int) -> None:
    found = pass_at(samples, tries)
    if tries > len(samples):
        assert found == {}
        return
    choices = list(combinations(samples, tries))
    assert found["1"] == pytest.approx(sum(1.0 in chosen for chosen in choices) / len(choices))
