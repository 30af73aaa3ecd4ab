"""The fast checks before a training: what they tell, that they change nothing, and what they leave alone."""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig, activity
from aitrain.environment.dataset import build_cases
from aitrain.workbench.check.before_training import FastCheck, check_quickly
from tests.conftest import has_ended


class Sums:
    """Right answers earn 1; counts its calls, and reads and writes much of its process."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(11, 31)]

    def reference(self, case_idx: int) -> str:
        return str(2 * (case_idx + 11))

    def score_episode(self, text: str, answer: str) -> float:
        self.scored.append(text)
        return float(text.strip() == answer)


def checked(environment: Any, seconds: float = 30.0, **options: Any) -> FastCheck:
    return check_quickly(environment, build_cases(environment, None)[0], TrainConfig(**options), seconds)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_healthy_environment_gets_one_line_and_leaves_no_file(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = checked(Sums(), rl_env_isolation=isolation)
    assert found.skipped == ""
    assert (found.findings, found.all_failed) == ((), "")
    assert list(found.lines()) == [f"Environment checks: {found.passed} passed."]
    assert found.passed >= 9
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
    expected, threads = random.getstate(), threading.active_count()

    found = checked(environment)

    assert found.passed
    assert random.getstate() == expected
    assert vars(environment) == {"scored": []}
    assert "SEEN" not in os.environ
    assert Path.cwd() == here
    assert threading.active_count() == threads
    assert bytes(activity.own.memory) == count
    assert capfd.readouterr().out == ""


def test_an_open_database_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "cache.db")):
        assert "the open database" in checked(Sums()).skipped


@contextmanager
def server() -> Iterator[tuple[socket.socket, int]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(0.1)
        yield listening, listening.getsockname()[1]


def was_called(listening: socket.socket) -> bool:
    try:
        listening.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_an_environment_that_connects_somewhere_is_left_alone_before_it_does() -> None:
    class Judged(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"what is this worth?")
            return 1.0

    with server() as (listening, port):
        found = checked(Judged())
        assert "it connects to" in found.skipped
        assert "127.0.0.1" in found.skipped
        assert not was_called(listening)
        Judged().score_episode("", "")
        assert was_called(listening)


class Generous(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 1.0


class Failing(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        raise KeyError("gold")


class NamesTheModel(Sums):
    def score_episode(self, model: Any, text: str, answer: str) -> float:  # type: ignore[override]
        raise AssertionError


class UsesTheModel(Sums):
    def score_episode(self, **given: Any) -> float:
        return float(given["model"].generate())


class OnGPU(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")


class Leaving(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        os._exit(3)


@pytest.mark.parametrize(
    ("environment", "skipped"),
    [
        (NamesTheModel, "need the model"),
        (UsesTheModel, "need the model"),
        (OnGPU, "its scores use the GPU"),
        (Leaving, "ended without a result"),
    ],
)
def test_an_environment_that_cannot_be_checked_in_a_fork_is_not_judged(environment: Any, skipped: str) -> None:
    found = checked(environment())
    assert skipped in found.skipped
    assert (found.findings, found.all_failed) == ((), "")


def test_what_is_wrong_is_said_in_few_lines_and_a_scorer_that_always_fails_is_named() -> None:
    lines = list(checked(Generous()).lines())
    assert any(line.startswith("Environment check floor (case ") for line in lines)
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

    found = checked(Slow(), seconds=2.0)
    assert found.left_out > 4
    assert list(found.lines()) == [
        f"Environment checks: {found.passed} passed, {found.left_out} left out for lack of time."
    ]
    assert has_ended(int(Path("pid").read_text()))
