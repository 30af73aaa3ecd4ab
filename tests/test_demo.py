"""The demo, as a newcomer runs it: it learns, on every seed, and from an installed wheel as well."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(command: list[str], folder: Path) -> str:
    """Run it in the folder; returns what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [7])  # .ci/wheel runs the demo's own seed
def test_the_demo_learns_to_add(seed: int, tmp_path: Path, preloaded_aitrain: Path) -> None:
    shown = run([str(preloaded_aitrain / "aitrain"), "demo", "--seed", str(seed), "--project-name", "mine"], tmp_path)

    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.85
    assert result["greedy_before"] < result["greedy_after"]
    assert result["steps"] == 80
    assert Path(result["model"]).is_dir()
    assert f"{result['score_after']:.3f}" in shown
    assert "run folder: runs/mine" in shown
    assert "report: runs/mine/report.html" in shown
    assert "█" in shown
