"""The demo, as a newcomer runs it: it learns, also on another seed than its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


def test_the_demo_learns_to_add(tmp_path: Path, preloaded_aitrain: Path) -> None:
    command = [str(preloaded_aitrain / "aitrain"), "demo", "--seed", "7", "--project-name", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.85
    assert result["greedy_before"] < result["greedy_after"]
    assert result["steps"] == 80
    assert Path(result["model"]).is_dir()
    assert f"{result['score_after']:.3f}" in done.stdout
    assert "report: runs/mine/report.html" in done.stdout
