"""Cases of two scorings are the same by their content."""

from __future__ import annotations

from aitrain.runs.recorded_scoring import CaseKey, match_cases
from aitrain.runs.records import RolloutRecord


def test_rows_that_repeat_are_matched_once_each_those_with_the_same_seed_first() -> None:
    def keys(*cases: tuple[str, int]) -> dict[str, CaseKey]:
        return {str(n): CaseKey.of(RolloutRecord(prompt=prompt, seed=seed)) for n, (prompt, seed) in enumerate(cases)}

    a = keys(("play", 1), ("y", 0), ("play", 2), ("only here", 0), ("play", 3))
    b = keys(("y", 0), ("play", 3), ("play", 4), ("only there", 0))
    assert match_cases(a, b) == [("0", "2"), ("1", "0"), ("4", "1")]
    assert match_cases(b, a) == [("0", "1"), ("1", "4"), ("2", "0")]
