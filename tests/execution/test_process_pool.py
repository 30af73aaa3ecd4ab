"""The environment's code in processes of its own: whatever it does there, the training process only hears of it."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aitrain.execution.async_calls import shared_loop
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import SERVER_GONE, ProcessPool, WorkerLease
from tests.conftest import CallerPool
from tests.execution.waiting import eventually

LONG = 30.0
"""A deadline that nothing here should come near."""


class Environment:
    """What is forked: `size` and `rows` are there before, or come with `update`."""

    def __init__(self, size: int = 3) -> None:
        self.size = size


class Episode:
    """Made in the process, from its environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.asked: list[Any] = []

    def ask(self, word: Any) -> list[Any]:
        self.asked.append(word)
        return self.asked

    def size(self) -> int:
        return self.environment.size

    def grow(self) -> int:
        self.environment.size += 1
        return self.environment.size

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def say(self, words: str) -> None:
        print(words)

    def pid(self) -> int:
        return os.getpid()

    def get(self, name: str) -> Any:
        return getattr(self.environment, name)

    def fail(self) -> None:
        raise ValueError("no such city")  # the line

    def leave(self, how: Any) -> None:
        raise SystemExit(how)

    def exit(self, code: int) -> None:
        os._exit(code)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self) -> None:
        faulthandler.disable()
        ctypes.string_at(0)

    def hang(self) -> None:
        time.sleep(1000)  # forever

    def hold(self) -> None:
        re.match(r"(a+)+$", "a" * 60 + "b")  # lets nobody else run

    async def later(self, word: str) -> tuple[str, int]:
        await asyncio.sleep(0.001)
        return word, os.getpid()

    async def hang_later(self) -> None:
        await asyncio.sleep(1000)

    async def block(self) -> None:
        time.sleep(1000)  # in the loop

    def local(self) -> Any:
        return lambda: None

    def echo(self, value: Any) -> Any:
        return value

    def draw(self) -> tuple[float, float]:
        return random.random(), float(np.random.random())

    def read(self) -> str:
        return sys.stdin.read() + os.read(0, 10).decode()

    def interrupt(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getppid(), signal.SIGINT)
        return "still here"

    def start(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    def remember(self, file: str) -> None:
        self.file = file

    def __del__(self) -> None:
        if hasattr(self, "file"):
            Path(self.file).write_text("dropped")


class Unreadable:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise ValueError("unreadable")


def broken(environment: Environment) -> Any:
    raise ValueError("cannot be made")


async def made_later(environment: Environment) -> Episode:
    return Episode(environment)


@pytest.fixture
def processes() -> Iterator[ProcessPool]:
    one = ProcessPool.start(Environment())
    yield one
    one.close()


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def asked(lease: WorkerLease, method: str, *arguments: Any, timeout: float = LONG) -> Any:
    """In a task, as it is used; a failure is returned."""
    pool = CallerPool(1, timeout)
    (outcome,) = pool.run([lambda: lease.call(method, *arguments)])
    assert pool.abandoned == 0, "no thread is abandoned for a process that hangs"
    pool.close()
    return outcome.failure or outcome.value


# -- calls


def test_an_object_keeps_its_state_from_call_to_call(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)

    assert asked(lease, "ask", 1) == [1]
    assert asked(lease, "ask", "two") == [1, "two"]


def test_the_object_is_made_in_its_process_from_the_environment(processes: ProcessPool) -> None:
    one, other = processes.lease(Episode), processes.lease(Episode)

    pids = {asked(one, "pid"), asked(other, "pid")}

    assert pids == {one.pid, other.pid}
    assert len({*pids, os.getpid(), processes.server_pid}) == 4
    assert asked(one, "size") == 3


def test_what_an_object_does_to_the_environment_stays_in_its_process(processes: ProcessPool) -> None:
    one, other = processes.lease(Episode), processes.lease(Episode)

    assert asked(one, "grow") == 4
    assert asked(one, "grow") == 5
    assert asked(other, "grow") == 4


def test_async_methods_are_finished_in_the_process(processes: ProcessPool) -> None:
    asyncio.run(asyncio.sleep(0))
    shared_loop()  # one of ours runs already, which is of no use to a forked process
    lease = processes.lease(made_later)

    assert asked(lease, "later", "word") == ("word", lease.pid)
    assert asked(lease, "later", "again") == ("again", lease.pid)


def test_the_time_of_a_call_is_charged(processes: ProcessPool, make_pool: Any) -> None:
    lease = processes.lease(Episode)

    (outcome,) = make_pool().run([lambda: lease.call("sleep", 0.2)])

    assert outcome.seconds >= 0.2


def test_much_can_be_said_and_returned(processes: ProcessPool) -> None:
    much = os.urandom(5_000_000)

    assert asked(processes.lease(Episode), "echo", much) == much


def test_64_leases_work_at_once(processes: ProcessPool, make_pool: Any) -> None:
    barrier = threading.Barrier(64)

    def job() -> int:
        lease = processes.lease(Episode)
        barrier.wait(LONG)
        pid = lease.call("pid")
        barrier.wait(LONG)
        lease.release()
        return int(pid)

    pids = [outcome.value for outcome in make_pool(64).run([job] * 64)]

    assert len(set(pids)) == 64
    assert None not in pids


def test_many_processes_do_not_run_out_of_files() -> None:
    """In a Python of its own, as its limit stays raised."""
    code = (
        "import resource, os\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "from aitrain.execution.processes import ProcessPool\n"
        "processes = ProcessPool.start(None)\n"
        "leases = [processes.lease(list.__class__) for _ in range(60)]\n"
        "print(len({lease.pid for lease in leases}))\n"
        "processes.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "60\n"


def test_processes_draw_different_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    processes = ProcessPool.start(Environment())
    drawn = [processes.lease(Episode).call("draw") for _ in range(3)]
    processes.close()

    assert len({number for pair in drawn for number in pair}) == 6


def test_processes_have_no_input(processes: ProcessPool) -> None:
    assert asked(processes.lease(Episode), "read") == ""


def test_a_lease_works_outside_of_a_job_too(processes: ProcessPool) -> None:
    assert processes.lease(Episode).call("size") == 3


# -- failures


def test_an_error_is_told_with_the_users_line_and_the_lease_goes_on(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)
    asked(lease, "ask", 1)
    failure = asked(lease, "fail")

    assert failure.kind == "raised"
    assert failure.message.startswith("raised: ValueError: no such city\nat ")
    assert failure.message.endswith('in fail: raise ValueError("no such city")  # the line')
    assert "Traceback" in failure.trace
    assert asked(lease, "ask", 2) == [1, 2]


def test_leaving_is_an_error_as_any(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)

    assert asked(lease, "leave", 3).kind == "raised"
    assert asked(lease, "size") == 3


def test_an_object_that_cannot_be_made_is_told(processes: ProcessPool) -> None:
    failure = asked(processes.lease(broken), "ask", 1)

    assert failure.kind == "raised"
    assert "cannot be made" in failure.message


def test_an_unknown_method_is_told(processes: ProcessPool) -> None:
    assert "AttributeError" in asked(processes.lease(Episode), "no_such_method").message


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("exit", (3,), "crashed: its process exited with code 3"),
        ("exit", (0,), "crashed: its process exited with code 0"),
        ("kill", (), "crashed: its process was ended by signal 9 (SIGKILL)"),
        ("segfault", (), "crashed: its process was ended by signal 11 (SIGSEGV)"),
    ],
    ids=str,
)
def test_a_crash_is_told_and_harms_nobody_else(
    processes: ProcessPool, method: str, arguments: tuple[Any, ...], message: str
) -> None:
    lease, other = processes.lease(Episode), processes.lease(Episode)
    asked(other, "ask", 1)

    assert asked(lease, method, *arguments) == Failure("crashed", message)
    assert asked(lease, "ask", 1) == Failure("crashed", message)
    assert asked(other, "ask", 2) == [1, 2]
    assert not is_alive(lease.pid)


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("hang", r"in hang: time\.sleep\(1000\)  # forever"),
        ("hold", r"in hold: re\.match.*# lets nobody else run"),
        ("block", r"in block: time\.sleep\(1000\)  # in the loop"),
        ("hang_later", None),
    ],
)
def test_what_hangs_is_ended_and_told_with_its_line(processes: ProcessPool, method: str, line: str | None) -> None:
    lease, other = processes.lease(Episode), processes.lease(Episode)
    asked(other, "ask", 1)
    asked(lease, "ask", 1)

    failure = asked(lease, method, timeout=0.5)

    assert failure.kind == "timed_out"
    first, *more = failure.message.split("\n")
    assert first == "timed out: no answer within 0.5 s"
    assert bool(more) == bool(line)
    assert not line or re.fullmatch(rf"at .*test_process_pool\.py, line \d+, {line}", more[0])
    assert asked(lease, "ask", 1) == failure
    assert asked(other, "ask", 2) == [1, 2]
    assert not is_alive(lease.pid)


def test_many_that_hang_are_ended_together(processes: ProcessPool, make_pool: Any) -> None:
    leases = [processes.lease(Episode) for _ in range(8)]
    methods = ["hang", "hold", "size", "exit"] * 2

    def job(lease: WorkerLease, method: str) -> Any:
        return lease.call(method, *([5] if method == "exit" else []))

    outcomes = make_pool(8, timeout=1.0).run(
        [lambda lease=lease, method=method: job(lease, method) for lease, method in zip(leases, methods, strict=True)]
    )

    kinds = [outcome.failure.kind if outcome.failure else outcome.value for outcome in outcomes]
    assert kinds == ["timed_out", "timed_out", 3, "crashed"] * 2


def test_what_it_has_started_is_ended_with_it(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)
    started = asked(lease, "start")
    assert is_alive(started)

    asked(lease, "hang", timeout=0.2)

    assert eventually(lambda: not is_alive(started))


def test_what_cannot_be_passed_between_processes_is_told(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)

    returned, given = asked(lease, "local"), asked(lease, "echo", threading.Lock())

    assert (returned.kind, given.kind) == ("wrong_type", "wrong_type")
    assert returned.message == "returned a function, which cannot be passed between processes"
    assert given.message == "was given a lock, which cannot be passed between processes"
    assert asked(lease, "ask", 1) == [1]
    assert asked(processes.lease(lambda environment: environment), "ask", 1).kind == "wrong_type"


def test_what_cannot_be_read_here_is_told(processes: ProcessPool) -> None:
    failure = asked(processes.lease(Episode), "echo", Unreadable())

    assert failure.kind in ("wrong_type", "raised")


def test_a_fork_server_that_is_killed_is_replaced_by_one_that_knows_the_same(processes: ProcessPool) -> None:
    processes.update({"size": pickle.dumps(7)})
    for _ in range(3):
        lease = processes.lease(Episode)
        asked(lease, "ask", 1)

        os.kill(processes.server_pid, signal.SIGKILL)

        assert eventually(lambda pid=lease.pid: not is_alive(pid))  # type: ignore[misc]
        assert asked(lease, "ask", 2) == SERVER_GONE
        lease.release()
        assert asked(processes.lease(Episode), "size") == 7


def test_without_any_fork_server_nothing_can_be_leased(processes: ProcessPool) -> None:
    for pid in (*children(processes.server_pid), processes.server_pid):
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(CallFailed) as raised:
        processes.lease(Episode)
    assert raised.value.failure == SERVER_GONE


def test_interrupts_are_for_the_training_process(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)

    assert asked(lease, "interrupt") == "still here"
    assert asked(processes.lease(Episode), "size") == 3


# -- release


def test_a_process_that_was_released_is_used_again_without_its_object(processes: ProcessPool) -> None:
    one = processes.lease(Episode)
    asked(one, "ask", 1)
    one.release()
    other = processes.lease(Episode)

    assert other.pid == one.pid
    assert asked(other, "ask", 2) == [2]


def test_the_object_of_a_lease_is_dropped_when_it_is_released(processes: ProcessPool, tmp_path: Path) -> None:
    lease, file = processes.lease(Episode), tmp_path / "dropped"
    asked(lease, "remember", str(file))
    assert not file.exists()

    lease.release()

    assert eventually(file.exists)


@pytest.mark.parametrize(("method", "arguments"), [("exit", (1,)), ("hang", ())])
def test_a_broken_process_is_not_used_again(processes: ProcessPool, method: str, arguments: tuple[Any, ...]) -> None:
    one = processes.lease(Episode)
    asked(one, method, *arguments, timeout=0.3 if method == "hang" else LONG)
    one.release()
    other = processes.lease(Episode)

    assert asked(other, "ask", 1) == [1]
    assert other._worker is not one._worker


def test_a_process_that_ended_while_nobody_leased_it_is_not_used_again(processes: ProcessPool) -> None:
    one = processes.lease(Episode)
    asked(one, "ask", 1)
    one.release()
    os.kill(one.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(one.pid))

    assert asked(processes.lease(Episode), "ask", 1) == [1]


def test_the_process_of_a_lease_that_was_dropped_is_ended(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)
    asked(lease, "ask", 1)
    pid = lease.pid

    del lease
    gc.collect()
    processes.lease(Episode)

    assert pid not in children(processes.server_pid)


def test_a_lease_is_released_once_and_not_used_after(processes: ProcessPool) -> None:
    lease = processes.lease(Episode)
    lease.release()
    lease.release()

    assert processes.lease(Episode).pid != processes.lease(Episode).pid
    with pytest.raises(RuntimeError, match="released"):
        lease.call("ask", 1)


def test_what_building_the_dataset_set_is_there_in_new_processes(processes: ProcessPool) -> None:
    old, kept = processes.lease(Episode), processes.lease(Episode)
    asked(kept, "ask", 1)
    old.release()
    processes.update({"rows": pickle.dumps(["a", "b"]), "size": pickle.dumps(2)})

    assert asked(processes.lease(Episode), "get", "rows") == ["a", "b"]
    assert asked(processes.lease(Episode), "size") == 2
    kept.release()
    assert all(asked(processes.lease(Episode), "size") == 2 for _ in range(3)), "also in place of one from before"


def test_what_cannot_be_set_is_told(processes: ProcessPool) -> None:
    with pytest.raises(CallFailed, match="raised: "):
        processes.update({"rows": b"no pickle"})

    assert asked(processes.lease(Episode), "size") == 3


# -- the end


def test_close_leaves_no_process() -> None:
    processes = ProcessPool.start(Environment())
    leases = [processes.lease(Episode) for _ in range(5)]
    pids = [processes.server_pid, *children(processes.server_pid)]
    assert {asked(lease, "pid") for lease in leases} < set(pids)
    leases[0].release()
    pool = CallerPool(1, 1.0)
    assert all(map(is_alive, pids))

    pool.run([lambda: leases[1].call("hang")])
    processes.close()
    processes.close()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    leases[2].release()
    assert asked(leases[3], "ask", 1) == SERVER_GONE
    with pytest.raises(CallFailed):
        processes.lease(Episode)
    pool.close()


@pytest.mark.slow
def test_nothing_leaks_over_many_leases(processes: ProcessPool) -> None:
    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def cycle(number: int) -> None:
        lease = processes.lease(Episode)
        if number % 4 == 0:
            with pytest.raises(CallFailed):
                lease.call("exit", 1)
        else:
            lease.call("ask", number)
        lease.release()

    cycle(0)
    cycle(1)
    before = descriptors(os.getpid()), descriptors(processes.server_pid)
    for number in range(200):
        cycle(number)
    cycle(1)

    assert (descriptors(os.getpid()), descriptors(processes.server_pid)) == before
    assert len(children(processes.server_pid)) == 2  # one that is idle, and the spare server


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_is_to_be_closed_is_not_kept_open() -> None:
    read, write = os.pipe()
    processes = ProcessPool.start(Environment(), close=[write])
    lease = processes.lease(Episode)
    asked(lease, "ask", 1)
    os.close(write)

    assert os.read(read, 1) == b"", "the other end was still open"
    os.close(read)
    processes.close()


TRAINER = """
import sys, threading, time
from aitrain.execution.processes import ProcessPool
from tests.execution.test_process_pool import Environment, Episode

print("printed once")  # waits in a buffer
processes = ProcessPool.start(Environment())
leases = [processes.lease(Episode) for _ in range(3)]
print(processes.server_pid, *(lease.call("pid") for lease in leases), flush=True)
for method, lease in zip(("hold", "hang"), leases):
    threading.Thread(target=lease.call, args=[method], daemon=True).start()
{end}
"""


def trainer(end: str) -> tuple[subprocess.Popen[str], list[int]]:
    command, root = [sys.executable, "-c", TRAINER.format(end=end)], Path(__file__).parents[2]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=buffered)
    assert started.stdout is not None
    assert started.stdout.readline() == "printed once\n"
    return started, [int(pid) for pid in started.stdout.readline().split()]


def test_a_training_process_that_is_killed_takes_all_with_it() -> None:
    started, pids = trainer("time.sleep(1000)")
    assert len(pids) == 4
    pids += children(pids[0])
    assert all(map(is_alive, pids))

    started.kill()
    output(started)

    assert eventually(lambda: not any(map(is_alive, pids)))


def test_a_training_process_that_ends_takes_all_with_it_and_prints_once() -> None:
    started, pids = trainer("processes.lease(Episode).call('pid'); sys.exit(0)")

    assert output(started) == ""
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_what_the_environment_prints_is_seen_at_once() -> None:
    started, _ = trainer("leases[2].call('say', 'said'); processes.close()")

    assert output(started) == "said\n"


def output(started: subprocess.Popen[str]) -> str:
    """All there is, which ends when nobody holds the other end any more."""
    assert started.stdout is not None
    with started:
        return started.stdout.read()
