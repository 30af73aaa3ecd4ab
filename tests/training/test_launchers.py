"""`aitrain grpo` under torchrun and mpirun's variables: two real processes that another program started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aitrain.runs.run_folder import read_object
from tests.conftest import free_port
from tests.training.test_processes import ENVIRONMENTS, FLAGS, Command, workers_in
from tests.training.test_resume import assert_same

TRAIN = ["grpo", f"--rl-env={ENVIRONMENTS}:Slow", *FLAGS, "--eval-cases=0", "--save-strategy=steps", "--save-steps=1"]


@pytest.fixture
def torchrun(preloaded_aitrain: Path) -> list[str]:
    python = str(preloaded_aitrain / "preloaded-python")
    place = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [python, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2", *place]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert left_in(tmp_path) == []


def left_in(folder: Path) -> list[int]:
    """What still runs in a folder, after it has had time to end."""
    deadline = time.monotonic() + 60
    while found := [each.pid for each in psutil.process_iter() if is_in(each, folder)]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)
    return []


def is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder
    except (psutil.Error, OSError):
        return False


def start(launcher: list[str], folder: Path, model: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*launcher, "-m", "aitrain", *TRAIN, f"--model={model}", *flags]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_two_processes_of_torchrun_end_with_the_weights_of_num_processes_2_though_one_was_killed(
    small_model: Path, folder: Path, torchrun: list[str], preloaded_aitrain: Path
) -> None:
    own = folder / "own"
    own.mkdir()
    command = Command(small_model, own, str(preloaded_aitrain / "aitrain"))
    more = ["--max-steps=6", "--save-total-limit=9", "--peft", "--lora-r=4", "--lora-dropout=0.3"]
    done = command.run("Slow", *TRAIN[2:], *more, "--num-processes=2")
    assert done.returncode == 0, done.stderr

    running = start([*torchrun, "--max-restarts=1"], folder, small_model, *more)
    Command(small_model, folder).wait_for_step(2, running)
    os.kill(workers_in(folder)[-1], signal.SIGKILL)
    out, err = running.communicate(timeout=300)

    assert running.returncode == 0, err
    assert sorted(path.name for path in folder.iterdir()) == ["own", "run"]
    assert out.count("run folder: run") == 1
    assert_same(own / "run", folder / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_a_torchrun_that_is_ended(
    number: signal.Signals, small_model: Path, folder: Path, torchrun: list[str]
) -> None:
    running = start(torchrun, folder, small_model, "--max-steps=500", "--save-strategy=no")
    Command(small_model, folder).wait_for_step(1, running)
    running.send_signal(number)  # which the preloaded server passes on
    running.communicate(timeout=240)

    assert left_in(folder) == []
    assert read_object(folder / "run" / "status.json")["status"] == "stopped"


def test_the_cause_of_a_failure_is_in_torchruns_error_file(
    small_model: Path, folder: Path, torchrun: list[str]
) -> None:
    running = start(torchrun, folder, small_model, "--rl-env-config", json.dumps({"wrong": 1}))
    _out, err = running.communicate(timeout=240)

    assert running.returncode == 1
    assert "Root Cause" in err
    assert "wrong" in err.partition("Root Cause")[2]
    assert list(folder.iterdir()) == []


def test_another_command_under_a_launcher_is_refused_once_in_one_sentence(here: Path) -> None:
    command = [sys.executable, "-m", "aitrain", "doctor"]
    ranks = [
        subprocess.run(
            command, env={**os.environ, **variables(rank)}, cwd=here, capture_output=True, text=True, check=False
        )
        for rank in (0, 1)
    ]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "Only aitrain grpo runs under torchrun" in ranks[0].stderr
    assert ranks[1].stderr == ""


def variables(rank: int) -> dict[str, str]:
    """What Open MPI's mpirun sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def test_processes_with_mpirun_s_variables_meet_without_a_store_of_their_launcher(
    small_model: Path, folder: Path
) -> None:
    command = [sys.executable, "-P", "-m", "aitrain", *TRAIN, f"--model={small_model}", "--max-steps=1"]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **variables(rank)}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    ends = [rank.communicate(timeout=240) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[1] == (b"", b"")
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert len(list((folder / "run" / "rollouts").iterdir())) == 2
