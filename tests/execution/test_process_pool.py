"""The environment's code in processes of its own: whatever it does there, the training process only hears of it."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from aitrain.execution.async_calls import shared_loop
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import SERVER_GONE, ProcessPool, Worker
from aitrain.execution.user_code import stack_of_dump
from tests.conftest import is_alive
from tests.execution.waiting import Clock, at_deadline, eventually


class Environment:
    """What is forked: `size` is there before, or comes with `update`."""

    shared = random.Random(0)

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.python, self.new, self.old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)


class Episode:
    """Made in the process, from its environment; what hangs makes a file before."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.asked: list[Any] = []

    def ask(self, word: Any) -> list[Any]:
        self.asked.append(word)
        return self.asked

    def grow(self) -> int:
        self.environment.size += 1
        return self.environment.size

    def draw(self) -> list[float]:
        own = self.environment
        return [one.random() for one in (random, np.random, own.shared, own.python, own.new, own.old)]

    def run(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def fail(self) -> None:
        raise ValueError("no such city")  # the line

    def hang(self, file: Path) -> None:
        file.touch() or time.sleep(1000)  # forever

    def hold(self, file: Path) -> None:
        file.touch() or re.match(r"(a+)+$", "a" * 60 + "b")  # lets nobody else run

    async def later(self, word: str) -> tuple[str, int]:
        await asyncio.sleep(0.001)
        return word, os.getpid()

    async def hang_later(self, file: Path) -> None:
        file.touch() or await asyncio.sleep(1000)

    def echo(self, value: Any) -> Any:
        return value or (lambda: None)  # which cannot be pickled

    def start(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    def remember(self, file: str) -> None:
        self.file = file

    def __del__(self) -> None:
        if hasattr(self, "file"):
            Path(self.file).write_text("dropped")


def broken(environment: Environment) -> Any:
    raise ValueError("cannot be made")


@pytest.fixture
def processes() -> Iterator[ProcessPool]:
    one = ProcessPool(Environment(), Episode)
    yield one
    one.close()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def asked(lease: Worker, method: str, *arguments: Any) -> Any:
    """A failure is returned."""
    try:
        return lease.call(method, *arguments)
    except CallFailed as error:
        return error.failure


def hung(clock: Clock, lease: Worker, method: str, folder: Path) -> Failure:
    """The failure of a call that hangs in a task, as it is used."""
    pool, file = DeadlinePool(1, 0.05), folder / f"{lease.pid} hangs"
    outcome = at_deadline(clock, pool, lambda: lease.call(method, file), file.exists)
    assert pool.abandoned == 0, "no thread is abandoned for a process that hangs"
    assert not outcome.is_running
    assert outcome.failure is not None
    return outcome.failure


# -- calls


def test_an_object_is_made_in_its_process_and_keeps_its_state_and_changes_to_the_environment_stay_there(
    processes: ProcessPool,
) -> None:
    one, other = processes.lease(), processes.lease()

    assert [asked(one, "ask", word) for word in (1, "two")] == [[1], [1, "two"]]
    assert {asked(one, "run", os.getpid), asked(other, "run", os.getpid)} == {one.pid, other.pid}
    assert len({one.pid, other.pid, os.getpid(), processes.server_pid}) == 4
    assert [asked(lease, "grow") for lease in (one, one, other)] == [4, 5, 4]
    much = os.urandom(5_000_000)
    assert asked(one, "echo", much) == much
    assert asked(one, "run", os.read, 0, 10) == b"", "it has no input"
    for pid in (other.pid, processes.server_pid):  # an interrupt is for the training process
        asked(other, "run", os.kill, pid, signal.SIGINT)
    assert asked(processes.lease(), "grow") == 4
    drawn = [asked(processes.lease(), "draw") for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 18


def test_async_methods_are_finished_in_the_process(processes: ProcessPool) -> None:
    shared_loop()  # one of ours runs already, which is of no use to a forked process
    lease = processes.lease()

    assert asked(lease, "later", "word") == ("word", lease.pid)


# -- failures


def test_an_error_is_told_with_the_users_line_and_the_lease_goes_on(processes: ProcessPool) -> None:
    lease = processes.lease()
    asked(lease, "ask", 1)
    failure = asked(lease, "fail")

    assert failure.kind == "raised"
    assert failure.message.endswith('in fail: raise ValueError("no such city")  # the line')
    assert "Traceback" in failure.trace
    assert asked(lease, "ask", 2) == [1, 2]
    with closing(ProcessPool(Environment(), broken)) as failing:
        assert "cannot be made" in asked(failing.lease(), "ask", 1).message


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (["run", os._exit, 0], "crashed: its process exited with code 0"),
        (["run", signal.raise_signal, signal.SIGKILL], "crashed: its process was ended by signal 9 (Killed)"),
    ],
)
def test_a_crash_is_told_and_harms_nobody_else(processes: ProcessPool, method: list[Any], message: str) -> None:
    lease, other = processes.lease(), processes.lease()
    asked(other, "ask", 1)

    assert asked(lease, *method) == Failure("crashed", message)
    assert asked(lease, "ask", 1) == Failure("crashed", message)
    assert asked(other, "ask", 2) == [1, 2]
    assert not is_alive(lease.pid)
    lease.close()
    assert [asked(processes.lease(), "ask", 1) for _ in range(2)] == [[1], [1]], "it is not used again"


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("hang", r"in hang: .*# forever"),
        ("hold", r"in hold: .*# lets nobody else run"),
        ("hang_later", ".*"),
    ],
)
def test_what_hangs_is_ended_with_what_it_has_started_and_told_with_its_line(
    clock: Clock, processes: ProcessPool, tmp_path: Path, method: str, line: str
) -> None:
    lease, other = processes.lease(), processes.lease()
    asked(other, "ask", 1)
    started = asked(lease, "start")
    assert is_alive(started)

    failure = hung(clock, lease, method, tmp_path)

    assert failure.kind == "timed_out"
    first, *more = failure.message.split("\n")
    assert first == "timed out: no answer within 0.05 s"
    assert re.fullmatch(rf"(at .*test_process_pool\.py, line \d+, )?{line}", "".join(more))
    assert eventually(lambda: not is_alive(started))
    assert not is_alive(lease.pid)
    assert asked(lease, "ask", 1) == failure
    assert asked(other, "ask", 2) == [1, 2]
    lease.close()
    assert asked(processes.lease(), "ask", 1) == [1], "it is not used again"


def test_what_cannot_be_passed_between_processes_is_told(processes: ProcessPool) -> None:
    lease = processes.lease()

    assert re.match(r"raised: .*pickle .*lambda", asked(lease, "echo", None).message)
    with pytest.raises(TypeError, match="pickle"):
        lease.call("echo", threading.Lock())
    assert asked(lease, "ask", 1) == [1]


# -- close


def test_a_process_that_was_released_is_used_again_without_its_object(processes: ProcessPool, tmp_path: Path) -> None:
    one, file = processes.lease(), tmp_path / "dropped"
    asked(one, "remember", str(file))
    assert not file.exists()
    one.close()
    one.close()
    assert eventually(file.exists)
    other = processes.lease()

    assert other.pid == one.pid
    assert asked(other, "ask", 2) == [2]
    assert processes.lease().pid != other.pid, "released once"
    other.close()
    os.kill(other.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(other.pid))
    assert asked(processes.lease(), "ask", 1) == [1], "one that has ended meanwhile is not used again"


def test_what_building_the_dataset_set_is_there_in_new_processes(processes: ProcessPool) -> None:
    processes.update({"size": pickle.dumps(7)})
    leases = [processes.lease() for _ in range(2)]
    assert [asked(lease, "grow") for lease in leases] == [8] * 2

    os.kill(processes.server_pid, signal.SIGKILL)

    assert eventually(lambda: not is_alive(leases[0].pid))
    assert asked(leases[0], "ask", 2) == SERVER_GONE
    with pytest.raises(CallFailed, match="was killed"):
        processes.lease()


# -- the end


def test_close_leaves_no_process(clock: Clock, tmp_path: Path) -> None:
    processes = ProcessPool(Environment(), Episode)
    leases = [processes.lease() for _ in range(4)]
    pids = [processes.server_pid, *children(processes.server_pid)]
    assert {asked(lease, "run", os.getpid) for lease in leases} < set(pids)
    leases[0].close()
    assert all(map(is_alive, pids))

    hung(clock, leases[1], "hang", tmp_path)
    processes.close()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert asked(leases[3], "ask", 1) == SERVER_GONE


TRAINER = """
import os, sys, tempfile, threading, time
from pathlib import Path
from aitrain.execution.processes import ProcessPool
from tests.execution.test_process_pool import Environment, Episode

print("printed once")  # waits in a buffer
processes = ProcessPool(Environment(), Episode)
leases = [processes.lease() for _ in range(3)]
print(processes.server_pid, *(lease.call("run", os.getpid) for lease in leases), flush=True)
for method, lease in zip(("hold", "hang"), leases):
    threading.Thread(target=lease.call, args=[method, Path("hangs")], daemon=True).start()
{end}
"""


@pytest.mark.parametrize("end", ["killed", "sys.exit(0)"])
def test_a_training_process_that_ends_takes_all_with_it_and_what_was_printed_is_seen_once(here: Path, end: str) -> None:
    code = TRAINER.format(end=f"leases[2].call('run', print, 'said'); {'time.sleep(1000)' if end == 'killed' else end}")
    root = str(Path(__file__).parents[2])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command, variables["PYTHONPATH"] = [sys.executable, "-c", code], root
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here, env=variables) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "printed once\n"
        pids = [int(pid) for pid in started.stdout.readline().split()]
        assert len(pids) == 4
        assert started.stdout.readline() == "said\n", "at once"
        if end == "killed":
            pids += children(pids[0])
            assert all(map(is_alive, pids))
            started.kill()
        assert started.stdout.read() == "", "which ends when nobody holds the other end any more"

    assert eventually(lambda: not any(map(is_alive, pids)))


def test_the_stack_of_a_dump_begins_inside_the_entry_also_in_a_folder_with_letters_that_are_escaped() -> None:
    dump = (
        "Current thread 0x01 (most recent call first):\n"
        '  File "mine.py", line 3 in step\n'
        '  File "m\\xfcller/processes.py", line 9 in answered\n'
        '  File "m\\xfcller/processes.py", line 5 in run\n'
    )
    assert [frame.name for frame in stack_of_dump(dump, ("müller/processes.py", "answered"))] == ["step"]
