"""The watchdog, with stand-ins for the training processes that hang in every way that a process can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aitrain import activity
from aitrain.activity import SLOT, Activity, read
from aitrain.events import Ended, Event, Failed
from aitrain.launch.preflight import check
from aitrain.launch.processes import Processes
from aitrain.options.train import TrainConfig
from aitrain.runs import watchdog
from aitrain.runs.heartbeat import Heartbeat, Progress
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.watchdog import Watchdog, waits_for_another_rank
from tests.conftest import is_alive
from tests.execution.waiting import eventually
from tests.hanging_worker import HANGS

TIMEOUT = 0.6
"""From when all processes have planted what they do; before, they may take as long as a busy machine lets them."""


class Run(Processes):
    """The real parent of a run, with stand-ins for the training processes."""

    what = "lock"

    def _hear(self, event: Event) -> None:
        super()._hear(event)
        if self.watchdog:
            self.watchdog.timeout = TIMEOUT

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.hanging_worker", self.what, str(self.folder.path)]


def run(folder: Path, what: str) -> tuple[Failed | Ended, RunFolder]:
    """How a run of one process ends."""
    plan = check(TrainConfig(model="tiny", num_processes=1, stall_timeout=60.0), has_environment=True)
    here = RunFolder(folder / "run")
    here.path.mkdir(parents=True)
    here.write_config(plan.config)
    made = Run(plan, here, lambda _: None)
    made.what = what
    return made.run(), here


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks ten times a second."""
    monkeypatch.setattr(watchdog, "LONGEST_POLL", 0.1)


# -- hangs


@pytest.mark.parametrize("what", HANGS)
def test_a_process_that_hangs_is_named_its_stacks_are_kept_and_nothing_is_left(what: str, tmp_path: Path) -> None:
    end, folder = run(tmp_path, what)

    assert isinstance(end, Failed)
    assert (end.exit_code, end.status) == (1, "stalled")
    assert f"It hangs in: training, planting {what}." in end.message
    assert "more time: --stall-timeout" in end.message
    assert len(end.message.splitlines()) <= 5
    log = folder.log.read_text()
    pid = int((folder.path / "pid").read_text())
    assert f"Stalled: rank 0, training, planting {what}." in log
    assert f"in {what}\n" in log  # the function, in a stack
    assert eventually(lambda: not is_alive(pid))


# -- no hangs


def test_only_polls_in_which_no_process_gets_on_count() -> None:
    """Not those of a rank that waits for a slow one or for an environment."""
    memory = bytearray(2 * SLOT)
    waits, slow = Activity(memory, 0), Activity(memory, 1)
    dog = Watchdog(1.0, range(2), 2, lambda rank: read(memory, rank), print)

    def is_stalled(looks: int, ticks: bool = False) -> bool:
        found = False
        for _ in range(looks):
            if ticks:
                slow.tick()
            found = dog._is_stalled()
        return found

    assert not is_stalled(15, ticks=True)
    assert not is_stalled(9)
    assert is_stalled(2)
    slow.tick()
    assert not is_stalled(10)
    assert is_stalled(2)
    with waits.waiting("waiting for the environment", allows=60.0):
        waits.tick()
        assert not is_stalled(600)
    for rank in (waits, slow):
        rank.enter("saving", moves_files=True)
    assert not is_stalled(39)
    assert is_stalled(3)


def test_ranks_that_all_wait_for_one_of_another_machine_are_no_stall_of_this_one() -> None:
    memory = bytearray(2 * SLOT)
    for rank in range(2):
        Activity(memory, rank)
    dog = Watchdog(1.0, [0, 1], 3, lambda rank: read(memory, rank), print, waits=lambda rank, seen: rank in waiting)
    dog._is_stalled()
    waiting = {0, 1}
    assert dog._judged() is None
    waiting = {0}
    assert ", rank 1 of 3. " in dog._judged()


# -- what is said


def test_a_rank_in_a_collective_operation_is_told_from_one_that_hangs() -> None:
    thread = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 331 in wait\n\n'
    main = 'Current thread 0x2 (most recent call first):\n  File "{}", line 1 in barrier\n'
    assert waits_for_another_rank(thread + main.format("/x/torch/distributed/distributed_c10d.py"))
    assert not waits_for_another_rank(thread + main.format("/x/torch/nn/modules/module.py"))


# -- status.json


def test_a_heartbeat_says_the_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "own", Activity(bytearray(SLOT)))
    folder = RunFolder(tmp_path)
    activity.own.enter("training")
    Heartbeat(folder, Progress()).beat()
    assert read_object(folder.status)["phase"] == "training"


def test_a_launched_process_ends_those_of_the_environment_and_its_log_before_it_waits_for_its_command() -> None:
    code = """
import multiprocessing, os, time
from aitrain.events import COMMAND_VARIABLE, LAUNCHER_VARIABLE
from aitrain.jobs.worker import exit_now, open_event_channel
if (command := os.fork()) == 0:
    os.closerange(1, 3)
    os._exit(len(os.read(0, 1)))
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
os.environ |= {LAUNCHER_VARIABLE: "1", COMMAND_VARIABLE: str(command)}
exit_now(0, open_event_channel())
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stderr.read() == b""
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
