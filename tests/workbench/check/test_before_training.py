"""The fast checks before a training: what they tell, that they change nothing, and what they leave alone."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig, activity
from aitrain.environment.dataset import build_cases
from aitrain.execution.failure import CallFailed
from aitrain.execution.forked_call import call_forked
from aitrain.workbench.check.before_training import FastCheck, check_quickly
from aitrain.workbench.check.side_effects import network, side_effects, signals
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import OpenedEnvironment
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
    assert found.findings == ()
    assert list(found.lines()) == [f"Environment checks: {found.passed} passed."]
    assert found.passed >= 9
    assert not list(tmp_path.iterdir())


def test_a_finding_says_where_what_and_what_to_do() -> None:
    class Generous(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            return 1.0

    lines = list(checked(Generous()).lines())
    assert any(line.startswith("Environment check floor (case ") for line in lines)
    assert all(len(line.splitlines()) == 1 for line in lines)
    assert len(lines) <= 4


def test_an_environment_that_fails_on_every_answer_is_named() -> None:
    class Failing(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            raise KeyError("gold")

    found = checked(Failing())
    assert "KeyError: 'gold'" in found.all_failed
    assert found.played > 4
    assert checked(Sums()).all_failed == ""


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


def test_an_environment_that_is_connected_already_is_left_alone() -> None:
    class Connected(Sums):
        def __init__(self, port: int) -> None:
            super().__init__()
            self.connection = socket.create_connection(("127.0.0.1", port))

        def score_episode(self, text: str, answer: str) -> float:
            self.connection.sendall(b"x")
            return 1.0

    with server() as (listening, port):
        environment = Connected(port)
        with closing(environment.connection):
            assert f"it is connected to 127.0.0.1:{port}" in checked(environment).skipped
            other = listening.accept()[0]
            with closing(other):
                other.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    other.recv(1)


ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"


@pytest.mark.slow
def test_another_program_that_the_environment_talks_to_hears_nothing() -> None:
    class Piped(Sums):
        def __init__(self) -> None:
            super().__init__()
            pipe = subprocess.PIPE
            self.program = subprocess.Popen([sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, text=True)

        def score_episode(self, text: str, answer: str) -> float:
            assert self.program.stdin is not None
            assert self.program.stdout is not None
            print(text.replace("\n", " "), file=self.program.stdin, flush=True)
            return float(self.program.stdout.readline().strip() == answer)

    environment = Piped()
    assert "it is connected to another program" in checked(environment, seconds=3.0).skipped
    assert environment.score_episode("said by the run", "SAID BY THE RUN") == 1.0
    environment.program.communicate()


def test_a_local_service_that_the_environment_is_connected_to_hears_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "service")
    with closing(socket.socket(socket.AF_UNIX)) as listening, closing(socket.socket(socket.AF_UNIX)) as client:
        listening.bind(address)
        listening.listen()
        client.connect(address)
        with closing(listening.accept()[0]) as other:

            class Served(Sums):
                def score_episode(self, text: str, answer: str) -> float:
                    client.sendall(b"x")
                    return 1.0

            assert f"it is connected to {address}" in checked(Served()).skipped
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


def test_connections_that_the_environment_does_not_use_are_no_reason_to_skip_it() -> None:
    with server() as (_, port), closing(socket.create_connection(("127.0.0.1", port))):
        assert checked(Sums()).skipped == ""


def test_an_open_database_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "cache.db")):
        assert "the open database" in checked(Sums()).skipped
    assert checked(Sums()).skipped == ""


def test_a_rollout_that_asks_the_endpoint_by_http_is_checked() -> None:
    class Asking(Sums):
        score_episode = None

        def rollout(self, prompt: list[dict[str, str]], answer: str, endpoint: Any) -> float:
            body = json.dumps({"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}).encode()
            headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request) as response:
                reply = json.load(response)["choices"][0]["message"]["content"]
            return float(reply.strip() == answer)

    found = checked(Asking())
    assert (found.skipped, found.findings) == ("", ())


def test_nothing_that_goes_wrong_in_the_checks_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", no_memory)
    assert "Cannot allocate memory" in checked(Sums()).skipped


def test_an_environment_that_names_the_model_is_left_alone() -> None:
    class Generating(Sums):
        def score_episode(self, model: Any, text: str, answer: str) -> float:  # type: ignore[override]
            raise AssertionError

    assert "need the model" in checked(Generating()).skipped


def test_an_environment_that_uses_the_model_behind_keywords_is_not_judged() -> None:
    class Generating(Sums):
        def score_episode(self, **given: Any) -> float:
            return float(given["model"].generate())

    found = checked(Generating())
    assert "need the model" in found.skipped
    assert found.findings == ()


def test_an_environment_that_scores_on_the_gpu_is_not_judged_by_the_error_of_the_fork() -> None:
    class OnGPU(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")

    found = checked(OnGPU())
    assert "its scores use the GPU" in found.skipped
    assert (found.findings, found.all_failed) == ((), "")


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


@pytest.mark.slow
def test_an_environment_that_holds_the_interpreter_is_ended_as_well() -> None:
    class Holding(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))

    found = checked(Holding(), seconds=3.0)
    assert found.skipped == "the checks' process took more than 3 seconds"
    assert list(found.lines()) == [f"The environment was not checked: {found.skipped}."]


def test_an_environment_that_ends_its_process_ends_only_that_of_the_checks() -> None:
    class Leaving(Sums):
        def score_episode(self, text: str, answer: str) -> float:
            os._exit(3)

    assert checked(Leaving()).skipped == "the checks' process ended without a result"


def test_a_forked_call_returns_a_value_and_its_processes_end(tmp_path: Path) -> None:
    def start(_: object) -> list[int]:
        return [subprocess.Popen(["sleep", "600"], start_new_session=False).pid, os.getpid()]

    started, own = call_forked(start, 30.0)  # type: ignore[misc]
    assert own != os.getpid()
    assert has_ended(started)
    assert has_ended(own)


def test_a_forked_call_ends_what_left_its_process_group_too() -> None:
    def start(_: object) -> int:
        script = (
            "from subprocess import *; silent = {'stdout': DEVNULL, 'stderr': DEVNULL, 'start_new_session': True}\n"
            "print(Popen(['sleep', '600'], **silent).pid)"
        )
        return int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)

    assert has_ended(call_forked(start, 30.0))  # type: ignore[arg-type]


def test_a_forked_call_that_raises_is_a_failure() -> None:
    def fail(_: object) -> object:
        raise ValueError("no")

    with pytest.raises(CallFailed, match="ended without a result"):
        call_forked(fail, 30.0)


def test_the_checks_do_not_close_the_environment_of_the_run(here: Path) -> None:
    class Closing(Sums):
        def close(self) -> None:
            Path("closed").touch()

    assert checked(Closing()).passed
    with closing(Subject(OpenedEnvironment(Closing(), build_cases(Closing(), None)[0]), TrainConfig())) as subject:
        assert [*side_effects(subject), *network(subject), *signals(subject)] == []
        assert not Path("closed").exists()
