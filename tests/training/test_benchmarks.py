"""That every benchmark starts and gives its figures, and that what needs a GPU is ready to be run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_starts_and_prints_its_figures(name: str, preloaded_aitrain: Path) -> None:
    """In its shortest form, in which bounds need not be met."""
    done = run(str(preloaded_aitrain / "preloaded-python"), "-P", "-m", "benchmarks", name, "--short")

    _, _, *rows = done.stdout.splitlines()
    assert rows, done.stderr
    assert all(row.startswith(f"| {name} ") and "| failed " not in row for row in rows), done.stderr
    assert done.returncode == any(row.endswith("| NO  |") for row in rows)


@pytest.mark.slow
def test_all_that_needs_a_gpu_is_rehearsed_on_the_cpu(preloaded_aitrain: Path) -> None:
    """`make gpu` in its smallest form; both sides of the overhead must do the same work."""
    done = run(str(preloaded_aitrain / "preloaded-python"), "-P", "-m", "benchmarks.gpu_results", "--rehearse")

    assert done.returncode == 0, done.stdout + done.stderr
    written = done.stdout.partition("# Results on GPUs")[2]
    rows = {line.split(" | ")[0]: line for line in written.splitlines() if line.startswith("| ")}
    trained = "| a model trains within the memory of its plan: tiny"
    for name in (f"{trained}-full", "| a resumed run samples what it would have sampled",
                 "| tiny lora transformers: the same completions"):  # fmt: skip
        assert " passed " in rows[name]
    assert " skipped " in rows[f"{trained}-QLoRA 4 bits"]
