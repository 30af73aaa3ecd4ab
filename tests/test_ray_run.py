"""A run on Ray without Ray: the relay between ranks and command, the process of a rank, and the placement."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aitrain.errors import RunFailed
from aitrain.events import Ended, Failed, Started, Step, encode
from aitrain.launch import ray_worker
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.ray_processes import RayProcesses
from aitrain.launch.ray_relay import Meeting, RankNews, RankPlace, Requests, RunRelay
from aitrain.launch.ray_worker import RankJob, RankNumbers, RankProcess
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from tests.conftest import has_ended
from tests.ray_standin import started


def place(rank: int, **changes: str) -> RankPlace:
    return replace(RankPlace(rank, f"node{rank}", f"10.0.0.{rank}", "1.0", port=1000 + rank), **changes)


# -- the relay


def meet(relay: RunRelay, *starts: tuple[str, RankPlace]) -> list[Meeting]:
    async def all_of_them() -> list[Meeting]:
        return await asyncio.gather(*(relay.meet(*start) for start in starts))

    return asyncio.run(all_of_them())


def test_all_ranks_of_a_start_get_the_same_meeting_and_are_kept_from_starting_if_they_differ(tmp_path: Path) -> None:
    relay = RunRelay(RunFolder(tmp_path), 2, "the/checkpoint")
    first, second = meet(relay, ("a", place(1)), ("a", place(0)))
    assert first == second
    assert [one.rank for one in first.places] == [0, 1]
    assert first.checkpoint == "the/checkpoint"
    assert "1.0 on node0, 1.1 on node1" in meet(relay, ("b", place(0)), ("b", place(1, version="1.1")))[0].problem


def test_a_restart_takes_the_newest_checkpoint_once_there_was_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.launch.ray_relay.newest_checkpoint", lambda *_: Path("newest"))
    relay = RunRelay(RunFolder(tmp_path), 1, "first")
    assert meet(relay, ("a", place(0)))[0].checkpoint == "first"
    asyncio.run(relay.tell(RankNews(0, (encode(Step(1, 2, 0.5, 0.0)),))))
    assert meet(relay, ("b", place(0)))[0].checkpoint == "newest"


def test_the_key_of_the_vllm_server_reaches_the_ranks_and_is_not_shown(tmp_path: Path) -> None:
    relay = RunRelay(RunFolder(tmp_path), 1, None)
    asyncio.run(relay.serve({"VLLM_API_KEY": "hidden"}))
    meeting = meet(relay, ("a", place(0)))[0]
    assert meeting.server == {"VLLM_API_KEY": "hidden"}
    assert "hidden" not in repr(meeting) + repr(relay)


# -- the process of a rank


class Command(list[RankNews]):
    """The command's side of a rank: what it heard; it asks the run to stop once a rank is ready."""

    def tell(self, news: RankNews) -> Requests:
        self.append(news)
        return Requests(stops=int(READY in self.lines))

    @property
    def lines(self) -> list[str]:
        return [line for news in self for line in news.lines]


READY, END = encode(Started(1, 7)), encode(Ended("stopped", 1))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aitrain.launch.preflight.check_packages", lambda _: None)  # also without Ray
    return check(TrainConfig(model="tiny", rl_env="envs.arithmetic", launcher="ray", num_processes=2))


def process(plan: RunPlan, monkeypatch: pytest.MonkeyPatch, body: str) -> RankProcess:
    """A rank whose process runs this code; `say` writes a line for the command."""
    script = f"import os, signal, sys, time\nsay = lambda line: print(line, end='', flush=True)\n{body}"
    monkeypatch.setattr(ray_worker, "worker_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(ray_worker, "BEAT", 0.02)
    folder = RunFolder(Path.cwd() / "run")
    folder.path.mkdir()
    job = RankJob(plan, folder, str(Path.cwd()), "nonce", None)
    return RankProcess(job, RankNumbers(1, 2, 0, 1), Meeting((place(0), place(1)), None))


def test_a_rank_knows_the_others_by_its_variables_and_a_stop_request_reaches_it_as_sigterm(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = Command()
    body = f"signal.signal(signal.SIGTERM, lambda *_: (say({END!r}), os._exit(0)))\n"
    body += f"say(' '.join(os.environ[name] for name in {names!r}) + '\\n'); say({READY!r}); time.sleep(600)"
    process(plan, monkeypatch, body).run(command.tell)
    assert command.lines == ["1 0 2 1 10.0.0.0 1000\n", READY, END]


def test_the_loss_of_a_process_is_named_and_raises_so_that_ray_starts_it_again_without_what_it_forked(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command()
    body = "child = os.fork()\nif not child: time.sleep(600)\nsay(f'{child}\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunFailed, match=r"Rank 1 of 2 .*SIGKILL"):
        process(plan, monkeypatch, body).run(command.tell)
    assert "SIGKILL" in command[-1].exit
    assert has_ended(int(command.lines[0]))


# -- the command


@pytest.fixture
def command(plan: RunPlan) -> RayProcesses:
    folder = RunFolder(Path.cwd() / "run")
    folder.path.mkdir()
    shown: list[object] = []
    return RayProcesses(plan, folder, shown.append)


def shown(command: RayProcesses) -> str:
    return "\n".join(map(str, command.announce.__self__))  # type: ignore[attr-defined]


def test_a_lost_rank_and_the_restart_are_told_and_the_failures_of_the_others_are_not_the_end(
    command: RayProcesses,
) -> None:
    meeting = Meeting((place(0), place(1)), None)
    command._note_start(meeting)
    command._hear(RankNews(0, (encode(Failed("Connection closed by peer", 1)),)))
    command._hear(RankNews(1, exit="Rank 1 of 2 was ended by SIGKILL"))
    command._failure = RuntimeError("of Ray Train")
    assert "SIGKILL on node1" in command._end().message  # type: ignore[union-attr]
    command._note_start(replace(meeting, checkpoint="run/checkpoints/checkpoint-3"))
    assert "SIGKILL on node1, 10.0.0.1. All ranks continue from checkpoint-3" in shown(command)
    assert "Connection closed" not in shown(command)
    command._hear(RankNews(0, (encode(Ended("finished", 4)),)))
    assert command._end() == Ended("finished", 4)


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
