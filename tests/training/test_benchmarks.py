"""What needs a GPU: what it says without one, that it runs in its smallest form, and the page of its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_results

ROOT = Path(__file__).parents[2]


def without_gpu(module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", module]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["benchmarks.gpu", "benchmarks.gpu_results"])
def test_without_a_gpu_it_says_so_in_one_line(module: str) -> None:
    done = without_gpu(module)

    assert done.returncode == 2
    assert done.stderr.startswith("No CUDA GPU is visible")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


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


def test_the_page_of_results_is_made_of_what_was_found() -> None:
    file = ROOT / "docs" / "gpu-results.json"
    results = gpu_results.read_results(file) if file.exists() else {}

    assert (ROOT / "docs" / "gpu-results.md").read_text(encoding="utf-8") == gpu_results.page(results)
    assert ("Nobody has run it" in gpu_results.page(results)) is not bool(results)


def test_results_of_several_gpus_stand_one_below_the_other_and_hold_no_path() -> None:
    failed = gpu_results._first_line("AssertionError: /some/where/run.py | 3 < 4\nassert 3 < 4")
    check = {
        "state": "failed",
        "seconds": 61.2,
        "figures": {"plan / real": 1.4, "real MiB": 12345.6},
        "message": failed,
    }
    about = {"date": "2026-01-02", "GPUs": 2, "commit": "abc", "torch": "2.13.0"}
    found = {"machine": about, "checks": {"trains": check}, "overhead": {"step": {"table": "a table", "message": ""}}}
    written = gpu_results.page({"GPU B": found, "GPU A": {**found, "checks": {}}})

    assert written.index("## 2 x GPU A") < written.index("## 2 x GPU B")
    cells = "plan / real 1.4; real MiB 12,346; AssertionError: run.py \\| 3 &lt; 4"
    assert f"| trains | failed | 61 | {cells} |" in written
    assert "2026-01-02, commit abc: torch 2.13.0." in written
    assert "```\na table\n```" in written
