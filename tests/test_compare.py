"""`aitrain compare`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_in_process
from tests.runs.scorings import episodes, write_scoring


@pytest.fixture
def runs(here: Path) -> Path:
    """The evals `low` and `high`, in runs/."""
    low, high = {f"case {n}": [float(n % 4 == 0)] for n in range(40)}, {f"case {n}": [1.0] for n in range(40)}
    write_scoring(here / "runs" / "low", episodes(low))
    write_scoring(here / "runs" / "high", episodes(high))
    return here / "runs"


def test_it_prints_verdict_intervals_counts_and_transcripts(runs: Path) -> None:
    code, out, _ = run_in_process(f"compare low {runs}/high --transcripts 1")
    assert code == 0
    assert "sampled   0.250 [0.142, 0.402]  1.000 [0.912, 1.000]  +0.750 [+0.575, +0.858]  < 0.001  better" in out
    assert "40 cases, sampled: 30 won, 0 lost, 10 equal" in out
    assert "\nwon 1 of 30  0.000 -> 1.000  case 1 of low\n    user: case 1\n  low  score 0.000\n" in out
    assert "    assistant: this scores 0.0\n  high  score 1.000\n    assistant: this scores 1.0\n" in out
    assert "won 2" not in out


@pytest.mark.parametrize(
    ("models", "flags", "expected"),
    [
        ("high low", "--fail-if-worse 0", 4),
        ("high low", "--fail-if-worse=0.7", 0),
        ("low high", "--fail-if-worse 0", 0),
        ("high low", "", 0),
    ],
)
def test_a_worse_model_ends_with_code_4_if_asked(runs: Path, models: str, flags: str, expected: int) -> None:
    for arguments in (f"{models} {flags}", f"{flags} --json {models}"):
        code, _, err = run_in_process(f"compare {arguments}")
        assert code == expected
        assert ("-0.750 [-0.858, -0.575]" in err) == bool(expected)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("", "Missing argument"),
        ("high tiny", "There is no run, folder or file tiny"),
        ("high low --html gone/page.html", "gone/page.html: No such file"),
    ],
)
def test_what_cannot_be_compared_is_a_wrong_command(runs: Path, arguments: str, word: str) -> None:
    code, out, err = run_in_process(f"compare {arguments}")
    assert (code, out) == (2, "")
    assert word in err
