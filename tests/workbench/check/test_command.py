"""`aitrain env check` as a command: its exit codes, its output, and environments that crash, hang or print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aitrain.workbench.check.process import messages_of
from aitrain.workbench.check.report import as_json, exit_code, lines

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
        if self.how == "crash":
            os.kill(os.getpid(), 9)
        if self.how == "leave":
            os._exit(0)
        if self.how == "regex" and not text:
            re.match("(a+)+$", "a" * 50 + "!")
        if self.how == "escape":
            raise ValueError("\\x1b[31mred")
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
    [("envs.arithmetic",), ("envs.guess_number",), ("envs.hotel_booking", "-E", "cases=20", "-E", "held_out=5")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.slow
def test_the_bundled_environments_pass(environment: tuple[str, ...]) -> None:
    done = check(*environment, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(report["checks"]) >= 26
    assert [f for one in report["checks"] for f in one["findings"] if f["level"] != "info"] == []


@pytest.mark.parametrize("judge", ["exact", "lenient"])
@pytest.mark.slow
def test_rows_of_gsm8k_pass_by_both_judges(judge: str, tmp_path: Path) -> None:
    questions = [(n, n + 2, f"Tom has {n} apples and gets 2. How many has he now?") for n in range(30, 54)]
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} Answer after ####."}],
            "reward_model": {"ground_truth": str(truth), "style": "rule"},
        }
        for _, truth, question in questions
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = check("envs.gsm8k", "-E", f"data_path={tmp_path / 'rows.jsonl'}", "-E", f"judge={judge}", "--json")
    assert done.returncode == 0, done.stdout
    assert [
        f["check"] for one in json.loads(done.stdout)["checks"] for f in one["findings"] if f["level"] == "fail"
    ] == []


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:Env"], "there is no file nowhere.py"),
        (["envs.arithmetic:Arithmatic"], "Did you mean Arithmetic?"),
        (["envs.arithmetic", "-E", "case=3"], "does not take case. Did you mean cases?"),
        (["envs.arithmetic", "-E", "case"], "write KEY=VALUE"),
        (["envs.arithmetic", "--only", "flor"], "there is no check flor. Did you mean floor?"),
        (["envs.arithmetic", "--rl-score-range", "1"], "rl_score_range"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
@pytest.mark.slow
def test_a_wrong_command_is_refused_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = check(*arguments)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_values_of_E_are_json_if_they_parse_else_text() -> None:
    done = check("envs.arithmetic", "-E", "cases=7", "-E", "held_out=3", "--only", "dataset")
    assert done.stdout.startswith("Arithmetic: 7 cases, 3 held out")
    refused = check("envs.arithmetic", "-E", "cases=seven", "--only", "dataset")
    assert refused.returncode == 3
    assert "TypeError" in refused.stderr


@pytest.mark.parametrize(
    ("how", "said", "then"),
    [
        ("crash", "was ended by SIGKILL while the check model-use runs", "crashed: its process was ended by signal 9"),
        ("leave", "ended with exit status 0 while the check model-use runs", "crashed: its process exited with code 0"),
        ("regex", r"no sign of life for 5 seconds.*in score_episode: re.match", "timed out: no answer within 0.3 s"),
    ],
)
@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_finding_and_the_checks_go_on_in_processes(
    nasty: str, how: str, said: str, then: str
) -> None:
    done = check(nasty, "-E", f"how={how}", "--json", "--rl-env-timeout=0.3", "--only=model-use,exceptions,tools")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 3
    assert [one["name"] for one in report["checks"]] == ["model-use", "tools", "exceptions"]
    first, *found = [finding for one in report["checks"] for finding in one["findings"]]
    assert re.search(said, first["what"], re.DOTALL)
    assert "--rl-env-isolation process" in first["fix"]
    assert any(then in finding["what"] for finding in found)


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_reported(nasty: str, here: Path) -> None:
    request = {"options": {"rl_env": nasty, "rl_env_config": {"how": "hang"}}, "only": []}
    (error,) = list(messages_of("aitrain.workbench.worker", request, patience=3.0))
    assert "hangs while the environment is constructed" in error["error"]
    assert exit_code([error]) == 3


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


@pytest.mark.slow
def test_what_the_environment_prints_is_no_part_of_the_report(nasty: str) -> None:
    done = check(nasty, "-E", "how=quiet", "--json")
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "said by" not in done.stdout + done.stderr


def test_text_of_the_environment_cannot_control_the_terminal(nasty: str) -> None:
    done = check(nasty, "-E", "how=escape", "--only", "exceptions")
    assert done.returncode == 3
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred" in done.stdout


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


def test_checks_that_did_not_run_are_named_with_the_reason_and_not_called_ok() -> None:
    skipped = [result(skipped="one turn only"), result(skipped="no time left"), result(skipped="one turn only")]
    *found, _, summary = list(lines(skipped))
    assert found == [
        "-        not checked        floor, floor: one turn only",
        "-        not checked        floor: no time left",
    ]
    assert summary == "0 checks with 0 episodes in 0.3s: nothing found"


def test_a_fact_stands_in_the_line_of_its_check() -> None:
    first, *_, last = lines([result("info")])
    assert first.endswith("floor              W")
    assert last.endswith("nothing found")
