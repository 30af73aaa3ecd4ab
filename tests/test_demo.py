"""The demo, as a newcomer runs it: it learns, on every seed, and from an installed wheel as well."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = ["--rl-max-new-tokens", "8", "--eval-cases", "8"]


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


@pytest.mark.slow
def test_a_wheel_brings_the_model_and_the_environments(tmp_path: Path) -> None:
    """Its dependencies are this interpreter's: a .pth file adds them without the checkout."""
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run([*install, str(wheel)], tmp_path)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")

    (tmp_path / "empty").mkdir()
    aitrain = str(tmp_path / "venv" / "bin" / "aitrain")
    where = run([python, "-c", "import aitrain; print(aitrain.__file__)"], tmp_path / "empty")
    assert Path(where.strip()).is_relative_to(packages)
    run(
        [aitrain, "grpo", "--model", "tiny", "--rl-env", "envs.arithmetic", "--max-steps", "1", *SHORT],
        tmp_path / "empty",
    )
    result = json.loads((tmp_path / "empty" / "runs" / "project-name" / "result.json").read_text())
    assert result["eval_cases"] == 8
    report = (tmp_path / "empty" / "runs" / "project-name" / "report.html").read_text()
    assert "uPlot" in report
    assert "function transcript" in report
