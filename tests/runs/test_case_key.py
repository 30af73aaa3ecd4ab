"""Cases of two scorings are the same by their content."""

from __future__ import annotations

from aitrain.runs.case_key import CaseKey, match_cases
from aitrain.runs.rollout_record import RolloutRecord


def key(prompt: str, seed: int = 0) -> CaseKey:
    return CaseKey.of(RolloutRecord(prompt=prompt, seed=seed))


def test_rows_that_repeat_are_matched_once_each() -> None:
    a = {"0": key("x"), "1": key("y"), "2": key("only here"), "3": key("x"), "4": key("x")}
    b = {"6": key("x"), "7": key("y"), "8": key("x"), "9": key("only there")}
    assert match_cases(a, b) == [("0", "6"), ("1", "7"), ("3", "8")]
    assert match_cases(b, a) == [("6", "0"), ("7", "1"), ("8", "3")]


def test_of_rows_that_repeat_those_with_the_same_seed_belong_together() -> None:
    a = {"0": key("play", seed=1), "1": key("play", seed=2), "2": key("play", seed=3)}
    b = {"0": key("play", seed=3), "1": key("play", seed=4), "2": key("play", seed=1)}
    assert match_cases(a, b) == [("0", "2"), ("1", "1"), ("2", "0")]
