"""`aitrain grpo` under torchrun and mpirun's variables: two real processes that another program started."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aitrain.runs.run_folder import read_object
from tests.conftest import free_port, processes_in
from tests.execution.waiting import eventually
from tests.properties import run_in_process
from tests.training.test_processes import Command, workers_in
from tests.training.test_resume import assert_same

TRAIN = ["--eval-cases=0", "--save-strategy=steps", "--save-steps=1"]


@pytest.fixture
def torchrun(small_model: Path, folder: Path, preloaded_aitrain: Path) -> Callable[..., Command]:
    """`aitrain` on two ranks of torchrun, which gets these flags."""
    python = str(preloaded_aitrain / "preloaded-python")
    place = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launcher = [python, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2", *place]
    return lambda *flags: Command(small_model, folder, *launcher, *flags, "-m", "aitrain")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert eventually(lambda: not processes_in(tmp_path), 60)


@pytest.mark.slow
def test_two_processes_of_torchrun_end_with_the_weights_of_num_processes_2_though_one_was_killed(
    small_model: Path, folder: Path, torchrun: Callable[..., Command], preloaded_aitrain: Path
) -> None:
    own = folder / "own"
    own.mkdir()
    more = [*TRAIN, "--max-steps=6", "--save-total-limit=9", "--peft", "--lora-r=4", "--lora-dropout=0.3"]
    done = Command(small_model, own, str(preloaded_aitrain / "aitrain")).run("Slow", *more, "--num-processes=2")
    assert done.returncode == 0, done.stderr

    command = torchrun("--max-restarts=1")
    running = command.start("Slow", *more)
    command.wait_for_step(2, running)
    os.kill(workers_in(folder)[-1], signal.SIGKILL)
    out, err = running.communicate(timeout=300)

    assert running.returncode == 0, err
    assert sorted(path.name for path in folder.iterdir()) == ["own", "run"]
    assert out.count("run folder: run") == 1
    assert_same(own / "run", folder / "run")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_survives_a_torchrun_that_is_ended(
    number: signal.Signals, folder: Path, torchrun: Callable[..., Command]
) -> None:
    command = torchrun()
    running = command.start("Slow", "--eval-cases=0", "--max-steps=500")
    command.wait_for_step(1, running)
    running.send_signal(number)  # which the preloaded server passes on
    running.communicate(timeout=240)

    assert eventually(lambda: not processes_in(folder), 60)
    assert read_object(folder / "run" / "status.json")["status"] == "stopped"


def test_the_cause_of_a_failure_is_in_torchruns_error_file(folder: Path, torchrun: Callable[..., Command]) -> None:
    done = torchrun().run("Slow", "--rl-env-config", json.dumps({"wrong": 1}))

    assert done.returncode == 1
    assert "wrong" in done.stderr.partition("Root Cause")[2]
    assert list(folder.iterdir()) == []


def variables(rank: int) -> dict[str, str]:
    """What Open MPI's mpirun sets."""
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}


def test_another_command_under_a_launcher_is_refused_once_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        for name, value in variables(rank).items():
            monkeypatch.setenv(name, value)
        if rank == 0:
            code, _, err = run_in_process("doctor")
            assert (code, "Only aitrain grpo runs under torchrun" in err) == (2, True)
        else:
            with pytest.raises(SystemExit, match="2"):
                run_in_process("doctor")


@pytest.mark.slow
def test_processes_with_mpirun_s_variables_meet_without_a_store_of_their_launcher(
    small_model: Path, folder: Path
) -> None:
    command = Command(small_model, folder)
    ranks = [command.start("Slow", *TRAIN, "--max-steps=1", **variables(rank)) for rank in (0, 1)]
    ends = [rank.communicate(timeout=240) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[1] == ("", "")
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert len(list((folder / "run" / "rollouts").iterdir())) == 2
