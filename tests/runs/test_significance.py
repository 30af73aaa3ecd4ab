"""p-values, their correction, and power."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aitrain.runs.statistics import Power, holm, sign_flip_p_value

differences = st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 1 / 3, 0.5, 1.0]), min_size=1, max_size=9)


@given(differences)
@settings(max_examples=60, deadline=None)
def test_the_p_value_is_the_share_of_all_signs_with_a_mean_as_far_from_0(values: list[float]) -> None:
    measured = abs(math.fsum(values)) - 1e-9
    sums = [math.fsum(sign * value for sign, value in zip(signs, values, strict=True)) for signs in SIGNS[len(values)]]
    assert sign_flip_p_value(values) == pytest.approx(fmean(abs(total) >= measured for total in sums))


SIGNS = {count: list(product((-1, 1), repeat=count)) for count in range(1, 10)}


def test_with_many_cases_random_signs_come_near_the_exact_value_and_give_it_again() -> None:
    values = [1.0] * 42 + [-1.0] * 29
    tails = [sum(math.comb(71, count) for count in range(lost + 1)) / 2**71 for lost in (29, 28)]
    assert sign_flip_p_value(values) == pytest.approx(2 * tails[0])  # of one size: the test of McNemar
    assert sign_flip_p_value([*values, 0.5]) == pytest.approx(sum(tails), abs=0.005)
    assert sign_flip_p_value([*values, 0.5]) == sign_flip_p_value([*values, 0.5])
    assert sign_flip_p_value([1.0] * 99 + [0.5]) == 1 / 20_000


def test_holm_multiplies_the_smallest_by_all_and_never_reverses_the_order() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize("smallest", [0.01, 1.0])
def test_the_number_of_cases_and_the_smallest_difference_have_the_wanted_power(smallest: float) -> None:
    power = Power(0.5, smallest, 1.0, 1.0)
    needed = power.cases_needed(0.1)
    assert power.power(0.1, needed) >= 0.8 > power.power(0.1, needed - 1)
    assert power.power(power.detectable(needed), needed) == pytest.approx(0.8)
    assert power.cases_needed(1e-6) is None
    assert (power.power(9.0, 5), power.detectable(5), power.cases_needed(9.0)) == (0.0, None, 6)


def test_there_is_no_power_to_compute_where_all_cases_differ_by_the_same() -> None:
    assert Power.of([0.5, 0.5]) is Power.of([0.0] * 9) is Power.of([]) is None
    assert Power.of([0.5, -1.0, 0.0]) == Power(math.sqrt(7 / 12), 0.5, 1.0, changing=2 / 3)


def test_with_few_cases_the_power_is_that_of_enough_cases_that_change() -> None:
    """Of six cases all have to change: 2 / 2**5 is more than 0.05."""
    assert Power.of([1.0] * 147 + [0.0] * 53).power(0.735, 6) == pytest.approx(0.735**6, abs=1e-3)
    assert Power.of([1.0] * 147 + [0.0] * 53).cases_needed(0.735) == 9
