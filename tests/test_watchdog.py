"""The watchdog, with stand-ins for the training processes that hang in every way that a process can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from aitrain import activity
from aitrain.activity import SLOT, Activity, Snapshot, read
from aitrain.events import Ended, Event, Failed
from aitrain.launch import processes
from aitrain.launch.processes import Processes
from aitrain.options.train import TrainConfig
from aitrain.runs import watchdog
from aitrain.runs.heartbeat import SILENCE, Heartbeat, Progress, sign_of_life
from aitrain.runs.run_folder import RunFolder, read_object, write_json
from aitrain.runs.run_list import look
from aitrain.runs.watchdog import IdleClock, Stall, Watchdog, message, waits_for_another_rank
from tests.hanging_worker import HANGS

WORKER = Path(__file__).with_name("hanging_worker.py")
TIMEOUT = 0.6
"""From when all processes have planted what they do; before, they may take as long as a busy machine lets them."""


class Run(Processes):
    """The real parent of a run, with stand-ins for the training processes."""

    what = "lock"

    def _hear(self, event: Event) -> None:
        super()._hear(event)
        if len(self.pids) == self.plan.batch.processes and self.watchdog:
            self.watchdog.timeout = TIMEOUT

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.hanging_worker", self.what, str(self.folder.path)]


def run(folder: Path, what: str, count: int = 1, timeout: float = 60.0) -> tuple[Failed | Ended, RunFolder]:
    """How a run ends."""
    config = TrainConfig(model="tiny", stall_timeout=timeout)
    plan = plan_of(config, count)
    here = RunFolder(folder / "run")
    here.path.mkdir(parents=True)
    here.write_config(config)
    made = Run(plan, here, ignore)
    made.what = what
    return made.run(), here


def plan_of(config: TrainConfig, processes: int) -> Any:
    """What the parent reads of a plan."""
    return SimpleNamespace(
        config=config, batch=SimpleNamespace(processes=processes), processes=processes, gpus=[], checkpoint=None
    )


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks ten times a second."""
    monkeypatch.setattr(watchdog, "LONGEST_POLL", 0.1)


def ignore(event: Event) -> None:
    """Nothing is shown."""


def alive_in(folder: RunFolder) -> list[int]:
    """Processes of a run that are there a moment later: one that is killed may take one to end."""
    pids = [int(file.read_text()) for file in folder.path.glob("pid-*")]
    deadline = time.monotonic() + 10.0
    while alive := [pid for pid in pids if lives(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return alive


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- hangs


@pytest.mark.parametrize("what", HANGS)
def test_a_process_that_hangs_is_named_its_stacks_are_kept_and_nothing_is_left(what: str, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    end, folder = run(tmp_path, what)

    assert isinstance(end, Failed)
    assert (end.exit_code, end.status) == (1, "stalled")
    assert "The run stalled: no progress for 1 seconds (--stall-timeout)." in end.message  # 0.6, rounded
    assert f"It hangs in: training, planting {what}." in end.message
    assert "Nothing is saved yet. If that is only slow, start again with more time:\n  aitrain grpo" in end.message
    assert end.message.endswith(" --stall-timeout 60")
    assert len(end.message.splitlines()) <= 5
    log = folder.log.read_text()
    assert f"Stalled: rank 0, process {(folder.path / 'pid-0').read_text()}, training, planting {what}." in log
    assert f"in {what}\n" in log  # the function, in a stack
    assert alive_in(folder) == []
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_no_file_of_shared_memory_is_left_even_by_a_parent_that_is_killed(tmp_path: Path) -> None:
    made: list[Path] = []

    class Seen(Run):
        def _hear(self, event: Event) -> None:
            super()._hear(event)
            assert self.activity is not None
            made.append(self.activity.path)
            assert not self.activity.path.exists()

    plan: Any = plan_of(TrainConfig(model="tiny"), 1)
    seen = Seen(plan, RunFolder(tmp_path), ignore)
    seen.what = "steps"
    assert seen.run() == Ended("finished", 3)
    assert made


@pytest.mark.parametrize(("rank", "hang"), [(0, "c_call"), (1, "holds_the_gil")])
@pytest.mark.slow
def test_of_two_processes_the_one_that_hangs_is_named_and_not_the_one_that_waits(
    rank: int, hang: str, tmp_path: Path
) -> None:
    end, folder = run(tmp_path, f"{rank}:{hang}", count=2)

    assert isinstance(end, Failed)
    assert f"It hangs in: training, planting {hang}, rank {rank} of 2." in end.message
    log = folder.log.read_text()
    assert "Stalled: rank 0" in log
    assert "Stalled: rank 1" in log
    assert alive_in(folder) == []


def test_a_process_that_hangs_before_it_says_anything_is_ended_too(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Run, "_command", lambda _: [sys.executable, "-c", "import time; time.sleep(1000)"])
    end, _ = run(tmp_path, "", timeout=0.5)

    assert isinstance(end, Failed)
    assert "It hangs in: starting." in end.message


# -- no hangs


@pytest.mark.parametrize("what", ["steps", "slow_call", "writes_slowly"])
@pytest.mark.slow
def test_a_process_that_is_slow_and_gets_on_is_no_false_alarm(what: str, tmp_path: Path) -> None:
    """Steps, a call to the environment within its own deadline, and a save whose bytes arrive."""
    end, _ = run(tmp_path, what)

    assert end == Ended("finished", 3)


def test_a_rank_that_waits_for_a_slow_one_is_no_false_alarm() -> None:
    memory, stalls = bytearray(2 * SLOT), list[Stall]()
    Activity(memory, 0)
    slow = Activity(memory, 1)
    with Watchdog(0.2, 2, lambda rank: read(memory, rank), stalls.append):
        for _ in range(12):
            time.sleep(0.05)
            slow.tick()
        assert stalls == []


def test_time_in_which_the_watchdog_itself_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    clock = IdleClock(poll=2.0)
    now += 2.0
    assert clock.look(has_progressed=False) == 2.0
    now += 8 * 3600.0  # stopped by Ctrl-Z, or in a suspended machine
    assert clock.look(has_progressed=False) == 6.0
    assert clock.look(has_progressed=True) == 0.0


def test_a_run_that_is_stopped_by_a_signal_and_continued_is_no_false_alarm() -> None:
    code = "import time; print(1, flush=True); time.sleep(600)"
    halted = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert halted.stdout
    halted.stdout.readline()
    dog = Watchdog(0.1, 1, lambda _: Snapshot(7, activity.Part("training")), ignore_stall, {0: halted.pid})
    watched = [watchdog.WatchedProcess(0, IdleClock(0.1))]

    def become(state: str) -> None:
        while psutil.Process(halted.pid).status() != state:
            time.sleep(0.01)

    try:
        os.kill(halted.pid, signal.SIGSTOP)
        become(psutil.STATUS_STOPPED)
        for _ in range(4):
            time.sleep(0.1)
            assert not dog._is_stalled(watched)
        os.kill(halted.pid, signal.SIGCONT)
        become(psutil.STATUS_SLEEPING)
        assert watched[0].idle.seconds == 0.0
        while not dog._is_stalled(watched):  # from then on it counts again
            time.sleep(0.1)
    finally:
        halted.kill()
        halted.communicate()


def ignore_stall(stall: Stall) -> None:
    """Nothing is done about it."""


def test_a_run_that_failed_by_itself_is_not_said_to_have_stalled() -> None:
    stalls: list[Stall] = []
    dog = Watchdog(0.1, 1, lambda _: Snapshot(7, activity.Part("training")), stalls.append)
    dog.start().stop()
    time.sleep(0.3)

    assert stalls == []


def test_a_log_that_cannot_be_written_does_not_keep_a_run_that_hangs_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(processes, "ask_for_stacks", full)
    end, folder = run(tmp_path, "lock")

    assert isinstance(end, Failed)
    assert "It hangs in: training, planting lock." in end.message
    assert alive_in(folder) == []


# -- what is said


def test_the_message_says_what_was_saved_and_a_command_that_does_not_stall_at_the_same_place(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "my run")
    (folder.checkpoints / "checkpoint-12").mkdir(parents=True)
    write_json(folder.checkpoints / "checkpoint-12" / "manifest.json", {})
    write_json(folder.status, {"status": "running", "step": 14})

    assert message(Stall((1, 3), "training, weight sync", 1800.2), folder, 4).splitlines() == [
        "The run stalled: no progress for 1800 seconds (--stall-timeout).",
        "It hangs in: training, weight sync after step 14, ranks 1 and 3 of 4."
        f" {folder.log} has the stacks of all threads.",
        "Saved: checkpoint-12 (step 12). If that is only slow, continue with more time:",
        f"  aitrain grpo --config '{folder.config}' --resume --stall-timeout 7200",
    ]
    write_json(folder.status, {"status": "running", "job": "eval"})
    said = message(Stall((0,), "scoring 9 cases", 5.0), folder, 1)
    assert "If that is only slow, give it more time: --stall-timeout 60" in said
    assert "aitrain grpo" not in said


def test_a_rank_in_a_collective_operation_is_told_from_one_that_hangs() -> None:
    thread = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 331 in wait\n\n'
    main = 'Current thread 0x2 (most recent call first):\n  File "{}", line 1 in barrier\n'
    assert waits_for_another_rank(thread + main.format("/x/torch/distributed/distributed_c10d.py"))
    assert not waits_for_another_rank(thread + main.format("/x/torch/nn/modules/module.py"))
    assert not waits_for_another_rank(
        thread.replace("threading", "torch/distributed/elastic") + main.format("/x/env.py")
    )
    assert not waits_for_another_rank("")


def test_the_name_of_a_phase_that_is_too_long_or_odd_is_shortened() -> None:
    memory = bytearray(SLOT)
    Activity(memory).enter("loading " + "模型" * 400)
    assert read(memory, 0).part.name.startswith("loading 模型")


def test_nested_parts_are_shown_with_the_phase_and_end_with_an_error() -> None:
    memory = bytearray(SLOT)
    own = Activity(memory)
    own.enter("training")
    with own.doing("saving a checkpoint", moves_files=True):
        assert read(memory, 0).part.name == "training, saving a checkpoint"
        assert read(memory, 0).part.moves_files
        count = read(memory, 0).count
        with own.waiting("waiting for the environment", allows=60.0):
            assert read(memory, 0).part.allows == 60.0
            assert read(memory, 0).count == count
    with suppress(OSError), own.doing("saving a checkpoint"):
        raise OSError
    assert read(memory, 0).part.name == "training"
    assert not read(memory, 0).part.moves_files


# -- status.json


def test_runs_that_stalled_are_shown_as_such_whether_they_were_ended_or_hang(tmp_path: Path) -> None:
    def shown(name: str, **status: Any) -> str:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.config.write_text("model: tiny\n")
        write_json(folder.status, {**sign_of_life(), **status})
        return look(folder.path).status

    assert shown("ended", status="stalled") == "stalled"
    assert shown("hangs", status="running", stalls_at=time.time() - 2 * SILENCE) == "stalled"
    assert shown("late", status="running", stalls_at=time.time() - SILENCE / 2) == "running"
    assert shown("gone", status="running", stalls_at=time.time() - 2 * SILENCE, started=1) == "dead"
    assert shown("odd", status="running", stalls_at="soon") == "running"


def test_a_heartbeat_says_the_phase_and_when_the_run_counts_as_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "own", Activity(bytearray(SLOT)))
    folder = RunFolder(tmp_path)
    heartbeat = Heartbeat(folder, Progress(stall_timeout=100.0))
    activity.own.enter("training")
    heartbeat.beat()
    first = read_object(folder.status)
    heartbeat.beat()
    assert first["phase"] == "training"
    assert first["stalls_at"] == pytest.approx(time.time() + 100.0, abs=30.0)
    assert read_object(folder.status)["stalls_at"] == first["stalls_at"]
    with activity.own.doing("generating"):
        heartbeat.beat()
    assert read_object(folder.status)["phase"] == "training, generating"
    assert read_object(folder.status)["stalls_at"] > first["stalls_at"]


def test_an_orphan_that_hangs_ends_itself(tmp_path: Path) -> None:
    """Where the parent was killed, the training process has a watchdog of its own."""
    code = f"""
import sys, threading
from pathlib import Path
from aitrain import activity
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from aitrain.jobs.worker import _own_watchdog
activity.own.enter("training")
_own_watchdog(RunFolder(Path({str(tmp_path)!r})), TrainConfig(stall_timeout=0.3)).start()
threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)

    assert done.returncode == 1
    assert "Stalled without a parent: training." in (tmp_path / "train.log").read_text()
    assert read_object(tmp_path / "status.json")["status"] == "stalled"


def test_a_training_process_leaves_without_waiting_for_processes_of_the_environment() -> None:
    code = """
import atexit, multiprocessing, time
from aitrain.jobs.worker import exit_now
atexit.register(print, "first")
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
exit_now(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "first\n"


def test_progress_may_be_counted_from_many_threads_at_once() -> None:
    """Without a lock: increments may be lost, and the count changes nevertheless."""
    own = Activity(bytearray(SLOT))
    threads = [threading.Thread(target=lambda: [own.tick() for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(own.memory, 0).count > 0


def test_the_main_thread_is_in_the_log_of_a_process_with_more_threads_than_are_written(tmp_path: Path) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(watchdog.DUMPED_THREADS + 20)]
    for thread in threads:
        thread.start()
    try:
        watcher = threading.Thread(target=watchdog.write_stacks, args=[tmp_path / "train.log", "Stalled"])
        watcher.start()
        watcher.join()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    log = (tmp_path / "train.log").read_text()
    assert log.endswith("...\n")
    assert "test_the_main_thread_is_in_the_log" in log
