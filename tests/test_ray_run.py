"""A run on Ray without Ray: the files between ranks and command, the parent of a rank, and what Ray Train gets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain.errors import ConfigError
from aitrain.events import Announce, Ended, Event, Failed, Note, Step, decode, encode
from aitrain.launch import ray_processes
from aitrain.launch.machines import LaunchedRank
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import Processes
from aitrain.launch.ray_processes import (
    PRIVATE,
    STOP,
    RayProcesses,
    listening,
)
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from tests.conftest import is_alive
from tests.execution.waiting import eventually


@pytest.fixture
def plan(here: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.setattr("aitrain.launch.preflight.check_packages", lambda _: None)  # also without Ray
    monkeypatch.setattr(ray_processes, "LOOK", 0.02)
    return check(TrainConfig(model="tiny", rl_env="envs.arithmetic", launcher="ray", num_processes=2))


@pytest.fixture
def folder(plan: RunPlan, here: Path) -> RunFolder:
    made = RunFolder(here / "run")
    (made.path / PRIVATE).mkdir(parents=True)
    return made


# -- the parent of a rank


def run_rank(
    plan: RunPlan, folder: RunFolder, body: str, announce: Announce, monkeypatch: pytest.MonkeyPatch
) -> tuple[Processes, Failed | Ended]:
    """Rank 1 of two, whose process runs Python code; `say` writes a line for its parent."""
    say = "import os, signal, sys, time\nsay = lambda line: print(line, end='', flush=True)\n"
    monkeypatch.setattr(Processes, "_command", lambda _: [sys.executable, "-c", say + body])
    rank = LaunchedRank(1, 2, 0, 1, "10.0.0.0", 1000)
    made = Processes(plan, folder, announce, ranks=[rank], node=1)
    with listening(made):
        return made, made.run()


def test_a_rank_knows_the_others_by_its_variables_and_a_stop_request_reaches_it_as_sigterm(
    plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    end = Ended("stopped", 1)
    body = f"signal.signal(signal.SIGTERM, lambda *_: (say({encode(end)!r}), os._exit(0)))\n"
    body += f"values = ' '.join(os.environ[name] for name in {names!r})\n"
    body += f"say({encode(Note('VALUES'))!r}.replace('VALUES', values)); time.sleep(600)"
    heard: list[Event] = []

    def hear(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Note):
            (folder.path / PRIVATE / STOP).touch()

    assert run_rank(plan, folder, body, hear, monkeypatch)[1] == end
    assert Note("1 0 2 1 10.0.0.0 1000") in heard
    assert (folder.path / "train-node1.log").exists()


def test_the_loss_of_a_process_is_known_and_nothing_that_it_forked_is_left(
    plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    body = "child = os.fork()\nif not child: time.sleep(600)\n"
    body += f"say({encode(Note('CHILD'))!r}.replace('CHILD', str(child))); os.kill(os.getpid(), signal.SIGKILL)"
    rank, end = run_rank(plan, folder, body, heard.append, monkeypatch)
    assert isinstance(end, Failed)
    assert "Rank 1 of 2 ended without an error message: SIGKILL" in end.message
    assert (rank.last, rank.lost) == (None, end)
    assert eventually(lambda: not is_alive(int(heard[0].text)))


def test_a_restart_takes_the_newest_checkpoint_once_there_was_a_step(
    plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "newest_checkpoint", lambda *_: Path("newest"))
    plan = replace(plan, checkpoint=Path("first"))
    first, second = (ray_processes.first_words(plan, folder, "10.0.0.0") for _ in range(2))
    assert (first["name"], first["checkpoint"]) == ("start-1", Path("first"))
    assert second["checkpoint"] == Path("first")  # its records may still lie before newer checkpoints
    ray_processes.say(folder.path / PRIVATE / "start-2", 0, Step(1, 2, 0.5, 0.0))
    assert ray_processes.first_words(plan, folder, "10.0.0.0")["checkpoint"] == Path("newest")
    restarted = decode((folder.path / PRIVATE / "start-3" / "0.jsonl").read_text())
    assert restarted == Note("A rank was lost. All ranks continue from newest (restart 2 of 3).")


# -- the command


class Cluster:
    """Ranks that write what a test says, while Ray Train runs until the test ends it."""

    def __init__(self, plan: RunPlan, folder: RunFolder, over: Flag) -> None:
        self.folder, self.over, self.heard = folder, over, list[Event]()
        self.processes = RayProcesses(plan, folder, self.heard.append)
        self.running = Thread(target=self.run, daemon=True)
        self.running.start()
        self.next(2)  # it connects, and waits for room

    def run(self) -> None:
        self.end = self.processes.run()

    def start(self, number: int) -> Path:
        said = self.folder.path / PRIVATE / f"start-{number}"
        said.mkdir()
        return said

    def next(self, count: int = 1) -> Event:
        """The last one of the next events."""
        while len(self.heard) < count:
            assert self.running.is_alive() or self.heard
            time.sleep(0.005)
        found = self.heard[:count]
        del self.heard[:count]
        return found[-1]

    def ended(self) -> Failed | Ended:
        self.over.set()
        self.running.join()
        return self.end


@pytest.fixture
def cluster(plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(ray_processes, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(ray_processes, "has_gpus", lambda: False)
    over = Flag()
    monkeypatch.setattr(ray_processes, "fit", lambda *_: over.wait())
    made = Cluster(plan, folder, over)
    yield made
    made.ended()


def test_after_a_restart_the_failures_of_before_are_not_the_end(cluster: Cluster) -> None:
    said = cluster.start(1)
    ray_processes.say(said, 0, Failed("Connection closed by peer", 1))
    ray_processes.say(said, 0, Note("more"))
    assert cluster.next() == Note("more")
    again = cluster.start(2)
    ray_processes.say(again, 0, Ended("finished", 4))
    assert cluster.next() == Ended("finished", 4)
    assert cluster.ended() == Ended("finished", 4)


def test_an_error_of_the_run_itself_is_its_end_and_what_ray_says_where_there_is_none(cluster: Cluster) -> None:
    said = cluster.start(1)
    wrong = Failed("The environment is wrong", 3)
    ray_processes.say(said, 1, wrong)
    cluster.processes.failure = RuntimeError("of Ray Train")
    assert cluster.ended() == wrong
    cluster.processes.failed = None
    assert "of Ray Train" in str(cluster.processes._why_failed())


def test_ray_train_gets_the_number_of_processes_and_of_restarts(
    plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def connected(address: str | None) -> None:
        seen["address"] = address
        raise ConfigError("not connected")

    def trainer(job: object, **settings: object) -> SimpleNamespace:
        seen.update(settings)
        return SimpleNamespace(fit=lambda: None)

    train = SimpleNamespace(FailureConfig=SimpleNamespace, RunConfig=SimpleNamespace, ScalingConfig=SimpleNamespace)
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    modules = {
        "ray": SimpleNamespace(train=train, get_runtime_context=lambda: context),
        "ray.train": train,
        "ray.train.backend": SimpleNamespace(Backend=object, BackendConfig=object),
        "ray.train.v2.api.data_parallel_trainer": SimpleNamespace(DataParallelTrainer=trainer),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_processes, "connected", connected)
    monkeypatch.setattr(ray_processes, "has_gpus", lambda: False)
    named = check(TrainConfig(**plan.config.changed(), ray_address="10.0.0.1:6379"))
    with pytest.raises(ConfigError, match="not connected"):
        RayProcesses(named, folder, print).run()
    ray_processes.fit(named, folder)

    assert seen["address"] == "10.0.0.1:6379"
    assert seen["scaling_config"].num_workers == 2
    assert seen["scaling_config"].resources_per_worker == {"CPU": 1.0}
    assert seen["backend_config"].backend_cls.share_cuda_visible_devices
