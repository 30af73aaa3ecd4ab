"""The benchmark that needs a GPU: what it says without one, and that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def gpu_benchmark(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, "-P", "-m", "benchmarks.gpu", *arguments]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = gpu_benchmark()

    assert done.returncode == 2
    assert done.stderr.startswith("No CUDA GPU is visible")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_both_sides_do_the_same_work_on_the_cpu(preloaded_aitrain: Path) -> None:
    python = str(preloaded_aitrain / "preloaded-python")
    tiny = ["--device=cpu", "--shapes", "tiny", "--weights", "lora", "--pairs=1", "--steps=1"]
    done = gpu_benchmark(*tiny, python=python)

    assert done.returncode == 0, done.stderr
    for measure in ("seconds per step", "tokens per second", "peak resident memory, MiB"):
        assert f"tiny lora: {measure}" in done.stdout
    assert "the same completions on both sides: tiny lora: 1 of 1 pairs" in done.stdout
