"""The demo, as a newcomer runs it."""

from __future__ import annotations

from pathlib import Path

from aitrain.runs.run_folder import read_object
from tests.conftest import Run


def test_the_demo_learns_to_add(here: Path, aitrain: Run) -> None:
    done = aitrain("demo", "--project-name", "mine")
    assert done.returncode == 0, done.stdout + done.stderr

    result = read_object(here / "runs" / "mine" / "result.json")
    assert result["status"] == "finished"
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.85
    greedy = result["scores"]["greedy"]
    assert greedy["before"]["mean"] < greedy["after"]["mean"]
    assert result["steps"] == 80
    assert f"{result['score_after']:.3f}" in done.stdout
    assert "report: runs/mine/report.html" in done.stdout
