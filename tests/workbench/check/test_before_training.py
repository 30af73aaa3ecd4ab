"""The fast checks before a training: what they tell, and what they leave alone."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.events import Note
from aitrain.workbench.check.process import check_quickly
from aitrain.workbench.check.registry import chosen, run_check
from aitrain.workbench.check.subject import NO_TIME, EnvCheck, EnvFinding, Subject
from aitrain.workbench.opening import open_environment
from aitrain.workbench.player import Constant
from tests.conftest import is_alive, write
from tests.execution.waiting import eventually

SUMS = """
import os, socket, subprocess, time

class Sums:
    def build_dataset(self):
        return [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(11, 31)]

    def reference(self, case_idx):
        return str(2 * (case_idx + 11))

    def score_episode(self, text, answer, model):
        SCORE
"""
RIGHT = "return float(text.strip() == answer)"


def checked(here: Path, score: str, seconds: float = 60.0, **options: Any) -> list[Note]:
    write(here, {"sums.py": SUMS.replace("SCORE", score)})
    return check_quickly(TrainConfig(rl_env="sums.py", **options), seconds)[0]


def test_a_healthy_environment_gets_one_line_and_leaves_no_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "tmp"))
    assert checked(here, RIGHT, rl_env_isolation="process") == [Note("Environment checks: 7 passed.", "info")]
    assert not list((here / "tmp").iterdir())


def test_an_environment_that_connects_somewhere_is_left_alone_before_it_does(here: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        found = checked(here, f"socket.create_connection({listening.getsockname()}); {RIGHT}")
        assert "it connects to 127.0.0.1" in found[0].text
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_what_is_wrong_is_said_in_few_lines_and_a_scorer_that_always_fails_is_named(here: Path) -> None:
    lines = [note.text for note in checked(here, "return 1.0")]
    assert any(line.startswith("Environment check floor: ") for line in lines)
    assert len("".join(lines).splitlines()) <= 4
    write(here, {"sums.py": SUMS.replace("SCORE", "raise KeyError('gold')")})
    assert "KeyError: 'gold'" in check_quickly(TrainConfig(rl_env="sums.py"), 60.0)[1]
    found = checked(here, "return model.generate()")
    assert found == [Note("Environment checks: 2 passed, the others not made: its scores need the model.")]
    (finding,) = checked(here, "os._exit(3)")
    assert "ended with exit status 3" in finding.text


def test_checks_that_take_too_long_are_ended_with_what_they_started(here: Path) -> None:
    found = checked(here, "open('pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)", 5.0)
    assert found == [Note(f"Environment checks: 1 passed, the others not made: {NO_TIME}.")]
    assert eventually(lambda: not is_alive(int(Path("pid").read_text())))


# -- the parts that they are made of


class Slow:
    """Takes a while for each score."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {n}"} for n in range(20)]

    def score_episode(self, text: str) -> float:
        time.sleep(0.01)
        return 0.0


def play_many(subject: Subject) -> Iterator[EnvFinding]:
    subject.play((case, Constant(str(number))) for case in subject.sample for number in range(1000))
    yield EnvFinding("info", "All were played.")


def broken(_: object) -> Any:
    raise RuntimeError("mine")


def test_a_check_that_takes_too_long_or_fails_itself_is_stopped_and_the_next_one_runs() -> None:
    opened = open_environment(TrainConfig(), None, Slow())
    checks = [EnvCheck("broken", "", broken, False), EnvCheck("many", "", play_many), *chosen(["dataset"])]
    with closing(Subject(opened, seconds=0.2)) as subject:
        failed, many, last = [run_check(subject, check) for check in checks]
    assert failed.skipped == "the check itself failed: RuntimeError: mine"
    assert (many.findings, many.skipped) == ([], NO_TIME)
    assert last.skipped == ""
