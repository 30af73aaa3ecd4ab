"""Training on a Ray cluster of two machines; `make ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ray.cluster import BIN, SECONDS, Machine, Machines, can_make_machines, machines, wait_until

pytest.importorskip("ray", reason="Ray is not installed (extra ray); make ray installs it")
pytestmark = pytest.mark.skipif(not can_make_machines(), reason="network namespaces cannot be created here")

STEPS = 12
TRAIN = [
    str(BIN / "aitrain"), "grpo", "--model", "tiny", "--rl-env", "envs.arithmetic", "--rl-prompts-per-step", "2",
    "--rl-num-generations", "4", "--batch-size", "4", "--rl-max-new-tokens", "24", "--max-steps", str(STEPS),
    "--save-strategy", "steps", "--save-steps", "1", "--num-processes", "2", "--lr", "1e-3", "--eval-cases", "0",
    "--rl-kl-coef", "0", "--ddp-timeout", "60", "--no-rl-check",
]  # fmt: skip


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("ray") / "home") as network:
        yield network


@pytest.fixture(scope="module")
def cluster(network: Machines) -> list[Machine]:
    """Two machines with Ray, one CPU each, so that each has one rank."""
    first, second = network.add(), network.add()
    first.start_ray()
    second.start_ray(first.address)
    return [first, second]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def local(network: Machines, folder: Path) -> Path:
    """The run of two processes on one machine."""
    subprocess.run(
        [*TRAIN, "--project-name", "local"], cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return folder / "runs" / "local"


def launch(machine: Machine, folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    return machine.start(*TRAIN, "--launcher", "ray", "--project-name", name, *more, cwd=folder)


def done(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, text
    return text


def difference(one: Path, other: Path) -> float:
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def steps_of(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines]


def saves(run: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one is complete; older ones are deleted."""
    return any(int(path.name.rpartition("-")[2]) >= step for path in (run / "checkpoints").glob("checkpoint-*"))


def workers_of(run: Path) -> list[int]:
    """The training processes of a run, on all machines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if "aitrain.jobs.worker" in words and str(run) in words:
                found.append(int(process.name))
    return sorted(found)


def test_two_machines_train_as_two_local_processes_do_and_a_killed_rank_is_restarted(
    cluster: list[Machine], folder: Path, local: Path
) -> None:
    run = folder / "runs" / "killed"
    process = launch(cluster[0], folder, "killed")
    wait_until(lambda: saves(run, 2) or process.poll() is not None)
    for rank in workers_of(run)[-1:]:
        os.kill(rank, signal.SIGKILL)
    text = done(process)
    assert "rank 0 on node1, 10.88.0.1; rank 1 on node2, 10.88.0.2" in text or "rank 1 on node1" in text
    assert "SIGKILL" in text
    assert "restart 1 of 3" in text
    assert steps_of(run) == steps_of(local)
    assert difference(run, local) == 0.0
    assert workers_of(run) == []


def test_a_killed_machine_is_named_and_another_one_takes_its_place(
    network: Machines, cluster: list[Machine], folder: Path, local: Path
) -> None:
    run = folder / "runs" / "gone"
    process = launch(cluster[0], folder, "gone")
    wait_until(lambda: saves(run, 2) or process.poll() is not None)
    cluster[1].kill()
    third = network.add()
    third.start_ray(cluster[0].address)
    cluster[1] = third
    text = done(process)
    assert "node2 (10.88.0.2) is gone" in text
    assert "node3" in text
    assert steps_of(run) == steps_of(local)
    assert difference(run, local) == 0.0
