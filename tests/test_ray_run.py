"""A run on Ray without Ray: the files between ranks and command, the parent of a rank, and what Ray Train gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

import pytest

from aitrain.errors import ConfigError
from aitrain.events import Announce, Ended, Event, Failed, Note, Started, Step, decode, encode
from aitrain.launch import ray_processes, ray_worker
from aitrain.launch.local_processes import Ranks
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.ray_processes import RankFiles
from aitrain.launch.ray_worker import PRIVATE, STOP, RankJob, RankPlace, RankProcesses
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder, read_object
from tests.conftest import has_ended
from tests.ray_standin import started


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aitrain.launch.preflight.check_packages", lambda _: None)  # also without Ray
    monkeypatch.setattr(ray_worker, "LOOK", 0.02)
    monkeypatch.setattr(ray_processes, "LOOK", 0.02)
    return check(TrainConfig(model="tiny", rl_env="envs.arithmetic", launcher="ray", num_processes=2))


@pytest.fixture
def folder(plan: RunPlan) -> RunFolder:
    made = RunFolder(Path.cwd() / "run")
    (made.path / PRIVATE).mkdir(parents=True)
    return made


def place(rank: int) -> RankPlace:
    return RankPlace(rank, f"node{rank}", f"10.0.0.{rank}")


# -- the parent of a rank


class Script(RankProcesses):
    """Rank 1 of two, whose process runs Python code; `say` writes a line for its parent."""

    body = ""

    def _command(self) -> list[str]:
        say = "import os, signal, sys, time\nsay = lambda line: print(line, end='', flush=True)\n"
        return [sys.executable, "-c", say + self.body]


def rank_of(plan: RunPlan, folder: RunFolder, body: str, announce: Announce) -> Script:
    job = RankJob(plan, folder, str(Path.cwd()))
    here, places = Ranks(1, 1, 2, "10.0.0.0", 1000), [place(0), place(1)]
    made = Script(plan, folder, announce, rank=1, here=here, places=places, job=job)
    made.body = body
    return made


def test_a_rank_knows_the_others_by_its_variables_and_a_stop_request_reaches_it_as_sigterm(
    plan: RunPlan, folder: RunFolder
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    end = Ended("stopped", 1)
    body = f"signal.signal(signal.SIGTERM, lambda *_: (say({encode(end)!r}), os._exit(0)))\n"
    body += f"values = ' '.join(os.environ[name] for name in {names!r})\n"
    body += (
        f"say({encode(Note('VALUES'))!r}.replace('VALUES', values)); say({encode(Started(1, 7))!r}); time.sleep(600)"
    )
    heard: list[Event] = []

    def hear(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Started):
            (folder.path / PRIVATE / STOP).touch()

    assert rank_of(plan, folder, body, hear).run() == end
    assert Note("1 0 2 1 10.0.0.0 1000") in heard
    assert (folder.path / "train-node1.log").exists()


def test_the_loss_of_a_process_is_known_and_nothing_that_it_forked_is_left(plan: RunPlan, folder: RunFolder) -> None:
    heard: list[Any] = []
    body = "child = os.fork()\nif not child: time.sleep(600)\n"
    body += f"say({encode(Note('CHILD'))!r}.replace('CHILD', str(child))); os.kill(os.getpid(), signal.SIGKILL)"
    rank = rank_of(plan, folder, body, heard.append)
    end = rank.run()
    assert isinstance(end, Failed)
    assert "Rank 1 of 2 ended without an error message: SIGKILL" in end.message
    assert (rank.last, rank.lost) == (None, (1, -9))
    assert has_ended(int(heard[0].text))


def test_a_restart_takes_the_newest_checkpoint_once_there_was_a_step(
    plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "newest_checkpoint", lambda *_: Path("newest"))
    job = RankJob(replace(plan, checkpoint=Path("first")), folder, str(Path.cwd()))
    first, second = (ray_worker._first_words(job, "10.0.0.0") for _ in range(2))
    assert (first["name"], first["checkpoint"]) == ("start-000", "first")
    assert second["checkpoint"] == "first"  # its records may still lie before newer checkpoints
    ray_worker._say(folder.path / PRIVATE / "start-001" / "0.jsonl", Step(1, 2, 0.5, 0.0))
    assert ray_worker._first_words(job, "10.0.0.0")["checkpoint"] == "newest"


def test_the_key_of_the_vllm_server_is_not_shown(plan: RunPlan, folder: RunFolder) -> None:
    assert "hidden" not in repr(RankJob(plan, folder, ".", {"VLLM_API_KEY": "hidden"}))


# -- the command


class Cluster:
    """Ranks that write what a test says, while Ray Train runs until the test ends it."""

    def __init__(self, plan: RunPlan, folder: RunFolder) -> None:
        self.folder, self.over = folder, Flag()
        self.files = RankFiles(plan, folder, lambda event: None)
        self.files._fitting = Thread(target=self.over.wait, daemon=True)
        self.files._fitting.start()
        self.lines = self.files.lines()

    def start(self, number: int, checkpoint: str | None = None) -> Path:
        said = self.folder.path / PRIVATE / f"start-{number:03d}"
        said.mkdir()
        for rank in (0, 1):
            (said / f"{rank}.json").write_text(json.dumps({**asdict(place(rank)), "checkpoint": checkpoint}))
        return said

    def next(self) -> Event | None:
        return decode(next(self.lines))


@pytest.fixture
def cluster(plan: RunPlan, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(ray_processes, "machines", lambda: [place(0), place(1)])
    made = Cluster(plan, folder)
    yield made
    made.over.set()


def test_a_lost_rank_and_the_restart_are_told_and_the_failures_of_the_others_are_not_the_end(cluster: Cluster) -> None:
    said = cluster.start(0)
    assert cluster.next() == Note("Training on Ray: rank 0 on node0, 10.0.0.0; rank 1 on node1, 10.0.0.1.", "info")
    assert [node["host"] for node in read_object(cluster.folder.status)["nodes"]] == ["node0", "node1"]
    ray_worker._say(said / "0.jsonl", Failed("Connection closed by peer", 1))
    ray_worker._say(said / "0.jsonl", Note("more"))
    (said / "1.lost").write_text(json.dumps({"message": "Rank 1 of 2 was ended by SIGKILL"}))
    assert cluster.next() == Note("more")
    again = cluster.start(1, "run/checkpoints/checkpoint-3")
    note = cluster.next()
    assert isinstance(note, Note)
    assert note.text.startswith(
        "Rank 1 of 2 was ended by SIGKILL. All ranks continue from checkpoint-3 (restart 1 of 3): "
    )
    ray_worker._say(again / "0.jsonl", Ended("finished", 4))
    assert cluster.next() == Ended("finished", 4)
    cluster.over.set()
    assert list(cluster.lines) == []


def test_a_machine_that_is_gone_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.start(0)
    cluster.next()
    monkeypatch.setattr(ray_processes, "machines", lambda: [place(0)])
    cluster.start(1)
    assert "Machine node1 (10.0.0.1) is gone, with rank 1. All ranks continue from" in str(cluster.next())


def test_an_error_of_the_run_itself_is_its_end_and_what_ray_says_where_there_is_none(cluster: Cluster) -> None:
    said = cluster.start(0)
    cluster.next()
    wrong = Failed("The environment is wrong", 3)
    ray_worker._say(said / "1.jsonl", wrong)
    cluster.files.failure = RuntimeError("of Ray Train")
    cluster.over.set()
    assert cluster.next() == wrong
    cluster.files.failed = None
    assert "of Ray Train" in str(cluster.files._end())


def test_ray_train_gets_the_number_of_processes_and_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"launcher": "ray", "num_processes": 2, "max_failures": 7, "ray_address": "10.0.0.1:6379"}
    seen = started(TrainConfig(model="tiny", rl_env="envs.arithmetic", **options))  # type: ignore[arg-type]
    settings = seen["settings"]
    assert seen["address"] == "10.0.0.1:6379"
    assert settings["scaling_config"].num_workers == 2
    assert settings["scaling_config"].resources_per_worker == {"CPU": 1.0}
    assert settings["run_config"].failure_config.max_failures == 7


# -- options


@pytest.mark.parametrize(
    "options",
    [{"launcher": "ray"}, {"ray_address": "auto"}, {"max_failures": 5},
     *({"rl_env_workers": value} for value in ("ray:0", "ray", "0", -1, True))],
)  # fmt: skip
def test_options_of_ray_are_refused_without_it_or_its_number_of_processes(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(rl_env="envs.arithmetic", **options)
