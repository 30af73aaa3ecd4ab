"""The fast checks before a training: what they tell, that they change nothing, and what they leave alone."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig, activity
from aitrain.environment.dataset import build_cases
from aitrain.workbench.check.before_training import FastCheck, check_quickly
from aitrain.workbench.check.registry import EnvCheck, chosen, run_checks
from aitrain.workbench.check.subject import NO_TIME, EnvFinding, Subject
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import Constant
from tests.conftest import is_alive
from tests.execution.waiting import eventually


class Sums:
    """Right answers earn 1, others what a test says; notes its calls on itself."""

    def __init__(self, wrong: float = 0.0, seconds: float = 0.0) -> None:
        self.wrong, self.seconds, self.scored = wrong, seconds, list[str]()

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(11, 31)]

    def reference(self, case_idx: int) -> str:
        return str(2 * (case_idx + 11))

    def score_episode(self, text: str, answer: str) -> float:
        self.scored.append(text)
        time.sleep(self.seconds)
        return 1.0 if text.strip() == answer else self.wrong


def checked(environment: Any, seconds: float = 30.0, **options: Any) -> FastCheck:
    return check_quickly(environment, build_cases(environment, None)[0], TrainConfig(**options), seconds)


def test_a_healthy_environment_gets_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = checked(Sums(), rl_env_isolation="process")
    assert list(found.lines()) == [f"Environment checks: {found.passed} passed."]
    assert found.passed >= 7
    assert not list(tmp_path.iterdir())


class Changing(Sums):
    """Each score changes what it can of its process."""

    def score_episode(self, text: str, answer: str) -> float:
        random.seed(7)
        os.environ["SEEN"] = text
        os.chdir("/")
        self.last = text
        print("noise" * 100)
        threading.Thread(target=time.sleep, args=[0.01]).start()
        return super().score_episode(text, answer)


def test_nothing_of_the_process_changes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = Changing()
    count = bytes(activity.own.memory)
    random.seed(3)
    expected, threads = random.getstate(), set(threading.enumerate())

    found = checked(environment)

    assert found.passed
    assert random.getstate() == expected
    assert environment.scored == []
    assert not hasattr(environment, "last")
    assert "SEEN" not in os.environ
    assert Path.cwd() == here
    assert set(threading.enumerate()) <= threads
    assert bytes(activity.own.memory) == count
    assert capfd.readouterr().out == ""


def test_an_environment_that_connects_somewhere_is_left_alone_before_it_does() -> None:
    class Judged(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            socket.create_connection(address).close()
            return 1.0

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = listening.getsockname()
        assert "it connects to" in checked(Judged()).skipped
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


class Failing(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        raise KeyError("gold")


class UsesTheModel(Sums):
    def score_episode(self, **given: Any) -> float:
        return float(given["model"].generate())


class Leaving(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        os._exit(3)


@pytest.mark.parametrize(
    ("environment", "skipped"),
    [
        (UsesTheModel, "need the model"),
        (Leaving, "ended without a result"),
    ],
)
def test_an_environment_that_cannot_be_checked_in_a_fork_is_not_judged(environment: Any, skipped: str) -> None:
    found = checked(environment())
    assert skipped in found.skipped
    assert (found.findings, found.all_failed) == ([], "")


def test_what_is_wrong_is_said_in_few_lines_and_a_scorer_that_always_fails_is_named() -> None:
    lines = list(checked(Sums(wrong=1.0)).lines())
    assert any(line.startswith("Environment check floor: ") for line in lines)
    assert len("".join(lines).splitlines()) <= 4
    found = checked(Failing())
    assert "KeyError: 'gold'" in found.all_failed
    assert found.played > 4


def test_checks_that_take_too_long_are_ended_with_what_they_started(here: Path) -> None:
    class Slow(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            Path("pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
            return 1.0

    found = checked(Slow(), seconds=5.0)
    assert found.left_out > 4
    assert list(found.lines()) == [
        f"Environment checks: {found.passed} passed, {found.left_out} left out for lack of time."
    ]
    assert eventually(lambda: not is_alive(int(Path("pid").read_text())))


# -- the parts that they are made of


def play_many(subject: Subject) -> Iterator[EnvFinding]:
    subject.play((case, Constant(str(number))) for case in subject.sample for number in range(1000))
    yield EnvFinding("info", "All were played.")


def broken(_: object) -> Any:
    raise RuntimeError("mine")


def test_a_check_that_takes_too_long_or_fails_itself_is_stopped_and_the_next_one_runs() -> None:
    environment = Sums(seconds=0.01)
    opened = OpenedEnvironment(environment, build_cases(environment, None)[0])
    checks = [EnvCheck("broken", "", broken, "rows"), EnvCheck("many", "", play_many), *chosen(["dataset"])]
    with closing(Subject(opened, TrainConfig(), seconds=0.2)) as subject:
        failed, many, last = run_checks(subject, checks)
    assert failed.skipped == "the check itself failed: RuntimeError: mine"
    assert (many.findings, many.skipped) == ([], NO_TIME)
    assert last.skipped == ""
