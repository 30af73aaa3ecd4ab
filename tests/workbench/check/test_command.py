"""`aitrain env check` as a command: its exit codes, its output, and environments that crash, hang or print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aitrain.workbench.check.report import as_json, exit_code

FAULTY = Path(__file__).parents[2] / "environments" / "faulty"

NASTY = """
import os, re, sys, time

print("said by the module")


class Nasty:
    def __init__(self, how):
        self.how = how
        if how == "hang":
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(60)

    def build_dataset(self):
        return [{"prompt": f"say {n}"} for n in range(4)]

    def score_episode(self, text):
        print("said by score_episode")
        return 0.0
"""


def check(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`aitrain env check` with these arguments."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "aitrain", "env", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


@pytest.fixture
def nasty(tmp_path: Path) -> str:
    """An environment that does what its `how` says."""
    (tmp_path / "nasty.py").write_text(NASTY)
    return str(tmp_path / "nasty.py")


@pytest.mark.parametrize(
    "environment",
    [("envs.guess_number",), ("envs.hotel_booking", "-E", "cases=20", "-E", "held_out=5")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.slow
def test_the_bundled_environments_pass(environment: tuple[str, ...]) -> None:
    done = check(*environment, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(report["checks"]) >= 26
    assert [f for one in report["checks"] for f in one["findings"] if f["level"] != "info"] == []


def test_a_wrong_command_is_refused_with_exit_code_2() -> None:
    done = check("envs.arithmetic", "--only", "flor")
    assert (done.returncode, "Did you mean floor?" in done.stderr) == (2, True), done.stderr


def test_a_finding_says_what_where_why_and_how_to_mend_it_and_the_exit_code_is_3() -> None:
    done = check(f"{FAULTY}/scores_of.py:ShortIsGood", "--only", "floor,dataset")
    assert done.returncode == 3
    assert done.stdout.splitlines()[2:4] == [
        "ok       dataset            prompts, roles and case_idx are usable",
        "fail     floor              see below",
    ]
    assert "fail floor (case 0)\n      An empty reply earns 100% of what the reference earns" in done.stdout
    assert "\n  why " in done.stdout
    assert "\n  fix " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_command_that_is_stopped_ends_its_process_and_says_so(number: signal.Signals, nasty: str, here: Path) -> None:
    command = [sys.executable, "-m", "aitrain", "env", "check", nasty, "-E", "how=hang", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        while not Path("pid").exists() or not Path("pid").read_text():
            assert running.poll() is None
        running.send_signal(number)
        report = json.loads(running.communicate()[0])
    assert running.returncode == report["exit_code"] == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def result(*levels: str, skipped: str = "") -> dict[str, Any]:
    """A result of a check with findings of these levels."""
    found = [
        {"check": "floor", "level": level, "what": "W", "why": "", "fix": "", "case_idx": None} for level in levels
    ]
    return {"result": {"name": "floor", "description": "D", "findings": found, "skipped": skipped, "seconds": 0.1}}


def test_only_a_fail_changes_the_exit_code() -> None:
    assert exit_code([result("warning", "info")]) == 0
    assert exit_code([result("warning"), result("info", "fail")]) == 3
    assert json.loads(as_json([result("fail")]))["exit_code"] == 3
