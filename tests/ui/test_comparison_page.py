"""The page of a comparison: which cases and transcripts are in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.ui import comparison_page as pages
from aitrain.ui.comparison_page import comparison_page
from tests.runs.scorings import episodes, write_scoring
from tests.ui.test_page import data_in


def test_a_large_comparison_lists_its_cases_and_holds_some_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_CASES", {"won": 2, "lost": 1})
    monkeypatch.setattr(pages, "MOST_ROWS", 35)
    monkeypatch.setattr(pages, "MOST_SAMPLES", 1)
    base = {f"case {n}": [0.0, float(n % 4 == 0)] for n in range(40)}
    better = {name: [1.0, 1.0] if int(name[5:]) % 5 else [0.0, 0.0] for name in base}
    a, b = write_scoring(tmp_path / "a", episodes(base)), write_scoring(tmp_path / "b", episodes(better))
    (found,) = data_in(comparison_page(a, b))["comparisons"]
    assert (len(found["cases"]), found["counts"]["matched"]) == (35, 40)
    held = [case for case in found["cases"] if "sides" in case]
    assert sorted(case["outcome"] for case in held) == ["lost", "won", "won"]
    told = {case["outcome"]: [[one["score"] for one in side] for side in case["sides"]] for case in held}
    assert told == {"won": [[0.0], [1.0]], "lost": [[1.0], [0.0]]}, "the samples that differ"
