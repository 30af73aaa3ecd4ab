"""What needs a GPU: what it says without one, that it runs in its smallest form, and the page of its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def without_gpu(module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", module]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks.gpu", "benchmarks.gpu_results"])
def test_without_a_gpu_it_says_so_in_one_line(module: str) -> None:
    done = without_gpu(module)

    assert done.returncode == 2
    assert done.stderr.startswith("No CUDA GPU is visible")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_all_that_needs_a_gpu_is_rehearsed_on_the_cpu(preloaded_aitrain: Path) -> None:
    """`make gpu` in its smallest form; both sides of benchmarks.gpu must do the same work."""
    command = [str(preloaded_aitrain / "preloaded-python"), "-P", "-m", "benchmarks.gpu_results", "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    written = done.stdout.partition("# Results on GPUs")[2]
    rows = {line.split(" | ")[0]: line for line in written.splitlines() if line.startswith("| ")}
    trained = "| a model trains within the memory of its plan: tiny"
    assert [state for state in (" passed ", " failed ") if state in rows[f"{trained}-full"]] == [" passed "]
    assert "tokens per second" in rows[f"{trained}-LoRA"]
    assert "skipped | 0 | quantization needs CUDA |" in rows[f"{trained}-QLoRA 4 bits"]
    assert "score before" in rows["| the demos task is learned in bf16"]
    assert " passed " in rows["| a resumed run samples what it would have sampled"]
    assert " skipped " in rows["| a server gets the weights of each step by nccl"]
    assert "tiny lora: peak resident memory, MiB" in written
    assert "the same completions on both sides: tiny lora: 1 of 1 pairs" in written
