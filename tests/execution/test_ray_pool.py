"""Environments in a Ray cluster, with a stand-in for Ray: the actors are objects here, whose methods run in threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aitrain.execution import ray_pool
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.ray_connection import ClusterMachine
from aitrain.execution.ray_host import EnvHost
from aitrain.execution.ray_pool import HostHandle, RayPool
from aitrain.jobs.fork_host import env_command
from aitrain.options.train import TrainConfig
from tests.execution.waiting import Clock, at_deadline

SOURCE = '''
import os, time

class Env:
    """An environment whose calls do what tests need."""

    def __init__(self):
        self.word = "loaded"

    def build_dataset(self, tokenizer):
        return [{"prompt": "a"}]

    def score_episode(self, completion):
        return 1.0

    def say(self):
        return self.word, os.getpid()

    def hang(self, file):
        open(file, "w").close() or time.sleep(1000)

'''


itself = copy.copy
"""Makes the object of a lease; of a module that is imported at once in a new process."""


class StandInHandle(HostHandle):
    """A host without Ray: its calls run in threads of this process."""

    threads = ThreadPoolExecutor(16)

    def send(self, method: str, *arguments: object) -> Any:
        if self.is_lost:
            failed: Future[Any] = Future()
            failed.set_exception(CallFailed(Failure("crashed", "crashed: it is gone")))
            return failed
        return self.threads.submit(getattr(self.actor, method), *arguments)

    def result(self, reference: Any, seconds: float | None = None) -> Any:
        return reference.result(seconds)

    def kill(self) -> None:
        self.is_lost = True

    def wait(self, reference: Any, seconds: float) -> bool:
        try:
            reference.exception(seconds)
        except TimeoutError:
            return False
        return True


class StandInPool(RayPool):
    def _start_host(self, machine: ClusterMachine) -> HostHandle:
        return StandInHandle(EnvHost(self._command, self._files, self._attributes), machine)


def cluster(*names: str) -> list[ClusterMachine]:
    return [ClusterMachine(name, f"10.0.0.{n}", name, {"CPU": 4.0}, {"CPU": 4.0}) for n, name in enumerate(names)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("task")
        (folder / "task.py").write_text(SOURCE)
        patch.chdir(folder)
        patch.setattr(ray_pool, "machines", lambda: cluster("one", "two"))
        patch.setattr(ray_pool, "WAIT", 0.05)
        pool = StandInPool(env_command(TrainConfig(rl_env="task.py:Env")), 4, ExitStack())
        pool._start_missing()
        assert pool.problems == {}
        yield pool
        pool.close()


@pytest.fixture
def pool(shared: RayPool) -> Iterator[RayPool]:
    """Two machines, and no leases of earlier tests."""
    yield shared
    for host in shared._hosts.values():
        host.leases, host.is_lost = 0, False


def test_leases_go_to_the_machine_with_the_fewest_and_each_has_a_process(pool: RayPool) -> None:
    leases = [pool.lease(itself) for _ in range(4)]
    assert sorted(lease.host.machine.host for lease in leases) == ["one", "one", "two", "two"]
    said = [lease.call("say") for lease in leases]
    assert len({pid for _, pid in said}) == 4
    assert {word for word, _ in said} == {"loaded"}


def test_attributes_that_build_dataset_sets_reach_all_machines_and_later_ones(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.update({"word": pickle.dumps("set")})
    monkeypatch.setattr(ray_pool, "machines", lambda: cluster("one", "two", "three"))
    pool._start_missing()
    leases = [pool.lease(itself) for _ in range(3)]
    assert {lease.host.machine.host: lease.call("say")[0] for lease in leases} == dict.fromkeys(
        ["one", "two", "three"], "set"
    )
    pool._hosts.pop("three").ask("close")
    pool.update({"word": pickle.dumps("loaded")})


def test_a_call_that_hangs_ends_at_its_deadline_with_the_users_line_and_its_process_is_replaced(
    clock: Clock, pool: RayPool, make_pool: Any, tmp_path: Path
) -> None:
    lease, file = pool.lease(itself), tmp_path / "hangs"
    outcome = at_deadline(clock, make_pool(1, 0.05), lambda: lease.call("hang", str(file)), file.exists)
    assert outcome.failure is not None
    assert outcome.failure.kind == "timed_out"
    assert "task.py" in outcome.failure.message
    assert "time.sleep(1000)" in outcome.failure.message
    lease.release()
    assert [pool.lease(itself).call("say")[0] for _ in range(2)] == ["loaded", "loaded"], "its process is replaced"


def test_calls_of_a_lost_machine_fail_and_later_ones_go_elsewhere(pool: RayPool) -> None:
    lease = pool.lease(itself)
    lease.host.is_lost = True
    with pytest.raises(CallFailed, match="is gone"):
        lease.call("say")
    others = [pool.lease(itself) for _ in range(3)]
    assert {other.host.machine.host for other in others} == {"one", "two"} - {lease.host.machine.host}


def test_a_machine_that_does_not_answer_at_the_deadline_fails_the_call(
    clock: Clock, pool: RayPool, make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, asked, silent = pool.lease(itself), list[str](), threading.Event()
    monkeypatch.setattr(
        lease.host, "send", lambda method, *_: asked.append(method) or StandInHandle.threads.submit(silent.wait)
    )
    monkeypatch.setattr(lease.host, "ask", lambda *_, **__: [])
    outcome = at_deadline(clock, make_pool(1, 0.05), lambda: lease.call("say"), lambda: asked)
    silent.set()
    assert outcome.failure is not None
    assert outcome.failure.kind == "timed_out"
    assert not outcome.is_running


def test_a_machine_that_cannot_load_the_environment_is_left_out_and_named_once(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(*_: object, **__: object) -> None:
        raise CallFailed(Failure("crashed", "three: task.py cannot be loaded"))

    monkeypatch.setattr(ray_pool, "machines", lambda: cluster("one", "two", "three"))
    monkeypatch.setattr(StandInHandle, "ask", result)
    pool._start_missing()
    pool._start_missing()
    assert capsys.readouterr().out.count("three: task.py cannot be loaded") == 1
    assert "three" not in pool._hosts
    pool.problems.clear()


def test_machines_with_the_resource_environment_are_the_only_ones_that_run_it() -> None:
    first, other = cluster("one", "two")
    marked = ClusterMachine("cpu", "10.0.0.9", "cpu", {"environment": 1.0}, {})
    assert ray_pool._for_environments([first, marked, other]) == [marked]
    assert ray_pool._for_environments([first, other]) == [first, other]
