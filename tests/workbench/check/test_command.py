"""`aitrain env check` as a command: its exit codes, its output, and environments that crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_in_process

FAULTY = Path(__file__).parents[2] / "environments" / "faulty.py"
COMMAND = [sys.executable, "-m", "aitrain", "env", "check"]
HANGS = """
import os, time

class Hangs:
    def __init__(self):
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)

    def build_dataset(self): ...

    def score_episode(self): ...
"""
CRASHES = """
import os, signal

class Crashes:
    def build_dataset(self):
        return [{"prompt": f"say {n}"} for n in range(4)]

    def score_episode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def check(arguments: str) -> subprocess.CompletedProcess[str]:
    """`aitrain env check` with these arguments."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run([*COMMAND, *arguments.split()], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("environment", ["guess_number", 'hotel_booking --rl-env-config={"cases":20,"held_out":5}'])
@pytest.mark.slow
def test_the_bundled_environments_pass(environment: str) -> None:
    done = check(f"envs.{environment} --json")
    assert done.returncode == 0, done.stderr
    found = [finding for one in json.loads(done.stdout)["checks"] for finding in one["findings"]]
    assert [finding for finding in found if finding["level"] != "info"] == []


def test_a_wrong_command_is_refused_with_exit_code_2() -> None:
    code, _, err = run_in_process("env check envs.arithmetic --only flor")
    assert (code, "Did you mean floor?" in err) == (2, True), err


def test_a_check_that_fails_says_what_it_found_and_the_exit_code_is_3() -> None:
    done = check(f"{FAULTY}:ShortIsGood --only floor,dataset")
    assert done.returncode == 3
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:4]] == [["ok", "dataset"], ["fail", "floor"]]
    assert "The reply '' earns 100%" in done.stdout


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_and_the_checks_after_it_run_in_processes_only(here: Path) -> None:
    (here / "crashes.py").write_text(CRASHES)
    done = check("crashes.py --json --only=model-use,exceptions")
    assert done.returncode == 3
    assert "was ended by SIGKILL while the check model-use runs" in json.loads(done.stdout)["error"]
    done = check("crashes.py --json --only=exceptions --rl-env-isolation=process")
    assert "crashed" in json.loads(done.stdout)["checks"][0]["findings"][0]["what"]


@pytest.mark.slow
def test_a_command_that_is_stopped_ends_its_process_and_says_so(here: Path) -> None:
    (here / "hangs.py").write_text(HANGS)
    with subprocess.Popen([*COMMAND, "hangs.py", "--json"], stdout=subprocess.PIPE, text=True) as running:
        while not Path("pid").exists() or not Path("pid").read_text():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        report = json.loads(running.communicate()[0])
    assert running.returncode == report["exit_code"] == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
