"""The page of a comparison: which cases and transcripts are in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain.ui import comparison_page as pages
from aitrain.ui.comparison_page import comparison_page
from tests.runs.scorings import episodes, write_scoring
from tests.ui.test_page import Tags


def shown(a: Path, b: Path) -> Any:
    (found,) = json.loads(Tags(comparison_page(a, b)).data)["comparisons"]
    return found


def test_a_large_comparison_lists_its_cases_and_holds_some_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_CASES", {"won": 2, "lost": 1})
    monkeypatch.setattr(pages, "MOST_ROWS", 35)
    monkeypatch.setattr(pages, "MOST_SAMPLES", 1)
    base = {f"case {n}": [float(n % 4 == 0), 0.0] for n in range(40)}
    better = {name: [1.0, 1.0] if int(name[5:]) % 5 else [0.0, 0.0] for name in base}
    found = shown(write_scoring(tmp_path / "a", episodes(base)), write_scoring(tmp_path / "b", episodes(better)))
    assert (len(found["cases"]), found["counts"]["matched"]) == (35, 40)
    held = [case for case in found["cases"] if "sides" in case]
    assert sorted(case["outcome"] for case in held) == ["lost", "won", "won"]
    assert [[len(side) for side in case["sides"]] for case in held] == [[1, 1]] * 3
    assert {tuple(case["samples"]) for case in held} == {(2, 2)}


def test_a_case_that_an_interrupted_eval_has_no_sample_of_is_listed_without_transcripts(tmp_path: Path) -> None:
    greedy = episodes({"x": [0.0], "y": [1.0]}, eval_phase="eval_greedy")
    a = write_scoring(tmp_path / "a", [*greedy, *episodes({"x": [0.0], "y": [1.0]})])
    b = write_scoring(tmp_path / "b", [*greedy, *episodes({"x": [0.0]})])
    cases = {case["prompt"]: (case["outcome"], "sides" in case) for case in shown(a, b)["cases"]}
    assert cases == {"x": ("equal", True), "y": ("unscored", False)}
