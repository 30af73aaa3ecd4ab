"""A run on Ray without Ray: the relay between ranks and command, the process of a rank, and the placement."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from aitrain.errors import ConfigError, RunFailed
from aitrain.events import Ended, Failed, Started, Step, encode
from aitrain.execution.ray_connection import ClusterMachine
from aitrain.launch import ray_processes, ray_worker
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.ray_placement import Bundle, describe
from aitrain.launch.ray_processes import RayProcesses, cause_of
from aitrain.launch.ray_relay import Meeting, RankNews, RankPlace, Requests, RunRelay
from aitrain.launch.ray_worker import RankJob, RankNumbers, RankProcess
from aitrain.notebook import _for_one_process
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from tests.ray_standin import started


def place(rank: int, **changes: str) -> RankPlace:
    return replace(RankPlace(rank, f"node{rank}", f"10.0.0.{rank}", "1.0", port=1000 + rank), **changes)


# -- the relay


def meet(relay: RunRelay, *starts: tuple[str, RankPlace]) -> list[Meeting]:
    async def all_of_them() -> list[Meeting]:
        return await asyncio.gather(*(relay.meet(*start) for start in starts))

    return asyncio.run(all_of_them())


def test_all_ranks_of_a_start_get_the_same_meeting(tmp_path: Path) -> None:
    relay = RunRelay(RunFolder(tmp_path), 2, "the/checkpoint")
    first, second = meet(relay, ("a", place(1)), ("a", place(0)))
    assert first == second
    assert [one.rank for one in first.places] == [0, 1]
    assert first.checkpoint == "the/checkpoint"
    assert first.problem == ""


def test_a_rank_of_an_earlier_start_is_not_taken_for_one_of_this_start(tmp_path: Path) -> None:
    async def run() -> Meeting:
        relay = RunRelay(RunFolder(tmp_path), 2, None)
        left = asyncio.ensure_future(relay.meet("before", place(0, host="gone")))
        _, meeting = await asyncio.gather(relay.meet("now", place(1)), relay.meet("now", place(0)))
        assert not left.done()
        left.cancel()
        return meeting

    assert [one.host for one in asyncio.run(run()).places] == ["node0", "node1"]


def test_different_versions_and_a_missing_folder_keep_the_ranks_from_starting(tmp_path: Path) -> None:
    relay = RunRelay(RunFolder(tmp_path), 2, None)
    assert "1.0 on node0, 1.1 on node1" in meet(relay, ("a", place(0)), ("a", place(1, version="1.1")))[0].problem
    lacking = place(1, problem="node1 has no folder")
    assert meet(relay, ("b", place(0)), ("b", lacking))[0].problem == "node1 has no folder"


def test_a_restart_takes_the_newest_checkpoint_once_there_was_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.launch.ray_relay.newest_checkpoint", lambda *_: Path("newest"))
    relay = RunRelay(RunFolder(tmp_path), 1, "first")
    assert meet(relay, ("a", place(0)))[0].checkpoint == "first"
    assert meet(relay, ("b", place(0)))[0].checkpoint == "first"  # its records may still lie before newer checkpoints
    asyncio.run(relay.tell(RankNews(0, (encode(Step(1, 2, 0.5, 0.0)),))))
    assert meet(relay, ("c", place(0)))[0].checkpoint == "newest"


def test_news_are_taken_once_and_in_their_order(tmp_path: Path) -> None:
    async def run() -> None:
        relay = RunRelay(RunFolder(tmp_path), 1, None)
        assert await relay.take(0.01) == []
        assert await relay.tell(RankNews(0, ("a",))) == Requests()
        await relay.ask(Requests(stops=1))
        assert await relay.tell(RankNews(0, ("b",))) == Requests(stops=1)
        assert [news.lines for news in await relay.take(1.0) if isinstance(news, RankNews)] == [("a",), ("b",)]
        assert await relay.take(0.01) == []

    asyncio.run(run())


def test_the_key_of_the_vllm_server_reaches_the_ranks_and_is_not_shown(tmp_path: Path) -> None:
    relay = RunRelay(RunFolder(tmp_path), 1, None)
    asyncio.run(relay.serve({"VLLM_API_KEY": "hidden"}))
    meeting = meet(relay, ("a", place(0)))[0]
    assert meeting.server == {"VLLM_API_KEY": "hidden"}
    assert "hidden" not in repr(meeting) + repr(relay)


# -- the process of a rank


@dataclass
class Command:
    """The command's side of a rank: what it heard, and what it wants."""

    stop_at: type | None = None
    news: list[RankNews] = field(default_factory=list)

    def tell(self, news: RankNews) -> Requests:
        self.news.append(news)
        return Requests(stops=1 if self.stop_at and self.stop_at.__name__ in "".join(self.lines) else 0)

    @property
    def lines(self) -> list[str]:
        return [line for news in self.news for line in news.lines]


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


def test_what_the_process_says_reaches_the_command(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [encode(Started(1, 7)), encode(Ended("finished", 3))]
    command = Command()
    process(plan, monkeypatch, f"for line in {said!r}: say(line)").run(command.tell)
    assert command.lines == said


def test_a_rank_knows_the_others_by_its_variables(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = Command()
    process(plan, monkeypatch, f"say(' '.join(os.environ[name] for name in {names!r}))").run(command.tell)
    assert command.lines == ["1 0 2 1 10.0.0.0 1000"]


def test_rank_0_knows_the_machines_for_the_status(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command()
    process(plan, monkeypatch, "say(os.environ['AITRAIN_NODES'])").run(command.tell)
    assert [node["host"] for node in json.loads(command.lines[0])] == ["node0", "node1"]


def test_a_killed_process_is_named_and_raises_so_that_ray_starts_it_again(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command()
    with pytest.raises(RunFailed, match=r"Rank 1 of 2 .*SIGKILL"):
        process(plan, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)").run(command.tell)
    assert "SIGKILL" in command.news[-1].exit


def test_an_error_that_the_process_has_reported_does_not_start_it_again(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command()
    process(plan, monkeypatch, f"say({encode(Failed('no', 3))!r}); sys.exit(3)").run(command.tell)
    assert command.news[-1].exit == ""


def test_a_rank_that_waits_for_a_failed_one_is_ended_with_its_start_and_not_with_another(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = process(plan, monkeypatch, "time.sleep(1); say('later\\n'); time.sleep(60)")
    rank.meeting = replace(rank.meeting, start="now")
    heard: list[str] = []

    def tell(news: RankNews) -> Requests:
        heard.extend(news.lines)
        return Requests(over="now" if heard else "before")

    rank.run(tell)  # and does not raise, so that Ray does not start it again
    assert heard == ["later\n"]


def test_the_loss_of_a_process_is_noticed_and_one_that_it_forked_ends_with_it(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command()
    body = "child = os.fork()\nif not child: time.sleep(60)\nsay(f'{child}\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunFailed, match="SIGKILL"):
        process(plan, monkeypatch, body).run(command.tell)
    with pytest.raises(ProcessLookupError):
        os.kill(int(command.lines[0]), 0)


def test_a_stop_request_reaches_the_process_as_sigterm(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(stop_at=Started)
    ready, end = encode(Started(1, 7)), encode(Ended("stopped", 1))
    body = f"signal.signal(signal.SIGTERM, lambda *_: (say({end!r}), os._exit(0))); say({ready!r}); time.sleep(60)"
    process(plan, monkeypatch, body).run(command.tell)
    assert command.lines == [ready, end]


# -- the command


@dataclass
class Relay:
    """The relay's handle in the command, without Ray."""

    asked: list[Requests] = field(default_factory=list)

    @property
    def ask(self) -> Relay:
        return self

    def remote(self, requests: Requests) -> None:
        self.asked.append(requests)


@pytest.fixture
def command(plan: RunPlan) -> RayProcesses:
    folder = RunFolder(Path.cwd() / "run")
    folder.path.mkdir()
    shown: list[object] = []
    made = RayProcesses(plan, folder, shown.append)
    made.relay = Relay()
    return made


def shown(command: RayProcesses) -> str:
    return "\n".join(map(str, command.announce.__self__))  # type: ignore[attr-defined]


def test_a_lost_rank_and_the_restart_are_told_and_the_failures_of_the_others_are_not_the_end(
    command: RayProcesses,
) -> None:
    meeting = Meeting((place(0), place(1)), None)
    command._note_start(meeting)
    command._hear(RankNews(0, (encode(Failed("Connection closed by peer", 1)),)))
    command._hear(RankNews(1, exit="Rank 1 of 2 was ended by SIGKILL"))
    command._note_start(replace(meeting, checkpoint="run/checkpoints/checkpoint-3"))
    text = shown(command)
    assert "Rank 1 of 2 was ended by SIGKILL on node1, 10.0.0.1. All ranks continue from checkpoint-3" in text
    assert "restart 1 of 3" in text
    assert "Connection closed" not in text
    command._hear(RankNews(0, (encode(Ended("finished", 4)),)))
    assert command._end() == Ended("finished", 4)


def test_after_the_last_restart_the_loss_is_the_reason_and_not_what_followed_from_it(command: RayProcesses) -> None:
    command._note_start(Meeting((place(0), place(1)), None))
    command._hear(RankNews(0, (encode(Failed("Connection closed by peer", 1)),)))
    command._hear(RankNews(1, exit="Rank 1 of 2 was ended by SIGKILL"))
    command._failure = RuntimeError("of Ray Train")
    end = command._end()
    assert isinstance(end, Failed)
    assert end.message.startswith("Rank 1 of 2 was ended by SIGKILL on node1, 10.0.0.1.")


def test_an_error_of_the_run_itself_is_its_end(command: RayProcesses) -> None:
    command._note_start(Meeting((place(0), place(1)), None))
    command._hear(RankNews(1, (encode(Failed("The environment is wrong", 3)),)))
    assert command._end() == Failed("The environment is wrong", 3)


def test_machines_that_are_not_alike_end_the_run_before_its_start(command: RayProcesses) -> None:
    command._note_start(Meeting((place(0),), None, problem="node1 does not share the run folder"))
    assert command._end() == Failed("node1 does not share the run folder", 2)


def test_the_machines_are_in_the_status_of_the_run(command: RayProcesses) -> None:
    command._note_start(Meeting((place(0, gpus="0"), place(1, address="10.0.0.0", host="node0", gpus="1")), None))
    nodes = json.loads(command.folder.status.read_text())["nodes"]
    assert [(node["host"], node["gpus"]) for node in nodes] == [("node0", 2)]


def test_a_second_stop_kills(command: RayProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_processes.threading, "Thread", Immediately)
    command.stop()
    command.stop()
    assert command.relay.asked == [Requests(stops=1), Requests(stops=2)]


def listened(command: RayProcesses, monkeypatch: pytest.MonkeyPatch) -> Failed | Ended:
    """The end of a run whose ranks say nothing more, while Ray Train waits."""
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setattr(command, "_hear_all", lambda _: time.sleep(0.01))
    command._listen(SimpleNamespace(is_alive=lambda: True))  # type: ignore[arg-type]
    return command._end()


def test_a_stop_ends_the_wait_for_another_machine(command: RayProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    command._note_start(Meeting((place(0), place(1)), None))
    command._hear(RankNews(0, (encode(Failed("Connection closed by peer", 1)),)))
    command._hear(RankNews(1, exit="Rank 1 of 2 was ended by SIGKILL"))
    command.stop()
    assert listened(command, monkeypatch) == Failed("Stopped.", 130)


def test_a_second_stop_does_not_wait_for_a_machine_that_does_not_answer(
    command: RayProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "KILL_SECONDS", 0.05)
    command._note_start(Meeting((place(0), place(1)), None))
    command.stop()
    command.stop()
    assert listened(command, monkeypatch) == Failed("Stopped.", 130)


class Immediately(threading.Thread):
    """A thread that runs at its start."""

    def start(self) -> None:
        self.run()


def test_an_error_of_ray_is_told_without_its_traceback() -> None:
    died = RuntimeError("Training failed")
    error = RuntimeError("The actor died.\n\tclass_name: RayTrainWorker\nThe node has died.")
    vars(died)["worker_failures"] = {1: error}
    assert cause_of(died) == "Rank 1 was lost: The actor died. The node has died"


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


# -- placement


def machine(name: str, free: dict[str, float], total: dict[str, float] | None = None) -> ClusterMachine:
    return ClusterMachine(name, name, name, total or free, free)


TRAINING, SERVER = Bundle("training", {"CPU": 1.0, "GPU": 1.0}), Bundle("vLLM server", {"CPU": 1.0, "GPU": 2.0})


def test_the_placement_of_training_and_vllm_is_said() -> None:
    cluster = [machine("a", {"CPU": 8.0, "GPU": 2.0}), machine("b", {"CPU": 8.0, "GPU": 2.0})]
    text, fits = describe([SERVER, TRAINING, TRAINING], cluster)
    assert fits
    assert "1 x vLLM server (1 CPU and 2 GPU each), 2 x training" in text
    assert "vLLM server on a; training on b" in text


@pytest.mark.parametrize(
    ("total", "why"), [({"CPU": 8.0, "GPU": 4.0}, "in use by others"), ({"CPU": 8.0, "GPU": 1.0}, "does not have that")]
)
def test_what_does_not_fit_is_said_before_waiting(total: dict[str, float], why: str) -> None:
    text, fits = describe([SERVER, TRAINING], [machine("a", {"CPU": 8.0, "GPU": 1.0}, total)])
    assert not fits
    assert why in text
    assert "Ctrl-C" in text


# -- options


def test_ray_needs_the_number_of_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_processes"):
        TrainConfig(rl_env="envs.arithmetic", launcher="ray")


@pytest.mark.parametrize("options", [{"ray_address": "auto"}, {"max_failures": 5}])
def test_options_of_ray_are_refused_without_it(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="launcher"):
        TrainConfig(rl_env="envs.arithmetic", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"launcher": "ray", "num_processes": 1}, {"rl_env_workers": "ray:4"}])
def test_training_in_python_is_not_on_ray(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="runs on this machine"):
        _for_one_process(TrainConfig(rl_env="envs.arithmetic", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["ray:0", "ray", "ray:x", "0", -1, True])
def test_a_wrong_number_of_workers_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="rl_env_workers"):
        TrainConfig(rl_env="envs.arithmetic", rl_env_workers=value)  # type: ignore[arg-type]


def test_workers_are_a_number_or_one_on_ray() -> None:
    here, there = (TrainConfig(rl_env="envs.arithmetic", rl_env_workers=value) for value in ("8", "ray:64"))
    assert (here.env_calls, here.is_env_on_ray) == (8, False)
    assert (there.env_calls, there.is_env_on_ray) == (64, True)
