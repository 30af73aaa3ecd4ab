"""That every benchmark starts and gives its figures, and that what needs a GPU is ready to be run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.measuring import Figure, ratio

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_starts_and_prints_its_figures(name: str, preloaded_aitrain: Path) -> None:
    """In its shortest form, in which bounds need not be met."""
    done = run(str(preloaded_aitrain / "preloaded-python"), "-P", "-m", "benchmarks", name, "--short")

    head, _, *rows = done.stdout.splitlines()
    assert head.startswith("| benchmark")
    assert rows, done.stderr
    assert all(row.startswith(f"| {name} ") and "| failed " not in row for row in rows), done.stderr
    assert done.returncode == any(row.endswith("| NO  |") for row in rows)


def test_a_figure_is_judged_by_the_median_of_its_pairs_or_by_each_of_them() -> None:
    slower = ratio("seconds", [1.0, 1.1, 5.0], [1.0, 1.0, 1.0], most=1.1)

    assert slower.is_met
    assert not ratio("seconds", [1.0, 1.2, 1.2], [1.0, 1.0, 1.0], most=1.1).is_met
    assert not Figure("coverage", [0.95, 0.92, 0.96], 0.97, 0.93, is_each=True).is_met


def test_every_benchmark_has_a_claim_and_every_claim_a_benchmark_with_its_figure() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    claims = re.findall(r"^\| .* \| .* \| (.*) \| `(\w+)` \|$", page, re.MULTILINE)
    measured = dict(re.findall(r"^\*\*(\w+)\.\*\*(.*?)(?=^\*\*|^## )", page, re.MULTILINE | re.DOTALL))

    assert {name for _, name in claims} == {*NAMES} == {*measured}
    for figure, name in claims:
        for number in re.findall(r"[\d.,]*\d", figure):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", measured[name]), (name, number)


@pytest.mark.slow
def test_all_that_needs_a_gpu_is_rehearsed_on_the_cpu(preloaded_aitrain: Path) -> None:
    """`make gpu` in its smallest form; both sides of the overhead must do the same work."""
    done = run(str(preloaded_aitrain / "preloaded-python"), "-P", "-m", "benchmarks.gpu_results", "--rehearse")

    assert done.returncode == 0, done.stdout + done.stderr
    written = done.stdout.partition("# Results on GPUs")[2]
    rows = {line.split(" | ")[0]: line for line in written.splitlines() if line.startswith("| ")}
    trained = "| a model trains within the memory of its plan: tiny"
    for name in (f"{trained}-full", "| a resumed run samples what it would have sampled",
                 "| tiny lora: the same completions"):  # fmt: skip
        assert " passed " in rows[name]
    assert " skipped " in rows[f"{trained}-QLoRA 4 bits"]
    assert "tiny lora: peak memory, MiB" in written
