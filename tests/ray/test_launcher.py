"""Training on a Ray cluster of two machines; `make ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import read_lines
from tests.execution.waiting import eventually
from tests.machines.namespaces import Network, end_of
from tests.ray import test_environments
from tests.ray.cluster import SECONDS, add_machine, variables
from tests.training.conftest import difference

pytest.importorskip("ray", reason="Ray is not installed (extra ray); make ray installs it")

pytestmark = test_environments.pytestmark
STEPS = 24
TRAIN = [
    "grpo", "--model", "tiny", "--rl-env", "envs.arithmetic", "--rl-prompts-per-step", "2",
    "--rl-num-generations", "4", "--batch-size", "4", "--rl-max-new-tokens", "24", "--max-steps", str(STEPS),
    "--save-strategy", "steps", "--save-steps", "1", "--num-processes", "2", "--lr", "1e-3", "--eval-cases", "0",
    "--rl-kl-coef", "0", "--ddp-timeout", "60", "--no-rl-check",
]  # fmt: skip


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def saves(run: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one is complete; older ones are deleted."""
    return any(int(path.name.rpartition("-")[2]) >= step for path in (run / "checkpoints").glob("checkpoint-*"))


def workers_of(run: Path) -> list[int]:
    """The training processes of a run, on all machines."""
    words = {one.pid: one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])}
    return sorted(pid for pid, said in words.items() if {"aitrain.jobs.worker", str(run)} <= {*said})


def test_two_machines_train_as_two_local_processes_do_though_a_rank_and_a_machine_are_killed(
    cluster: Network, tmp_path: Path
) -> None:
    train, (first, second) = [*TRAIN, "--output-dir", str(tmp_path)], cluster.machines
    local = subprocess.Popen([sys.executable, "-m", "aitrain", *train, "--project-name", "local"])
    process = first.aitrain(*train, "--launcher", "ray", "--project-name", "ray", **variables(first.folder))
    here, there = tmp_path / "local", tmp_path / "ray"
    assert eventually(lambda: saves(there, 1) or process.poll() is not None, SECONDS)
    second.kill()  # first, as after a restart both ranks may be on one machine
    add_machine(cluster)
    assert eventually(lambda: saves(there, 4) or process.poll() is not None, SECONDS)
    for rank in workers_of(there)[-1:]:
        os.kill(rank, signal.SIGKILL)
    code, text = end_of(process, SECONDS)
    assert code == 0, text
    assert "Training on node1, 10.77.0.1: 1 of 2 ranks." in text
    for words in ("SIGKILL", "restart 1 of 3", "restart 2 of 3", "node3"):
        assert words in text, text
    assert local.wait(timeout=SECONDS) == 0
    assert steps_of(there) == steps_of(here) == list(range(1, STEPS + 1))
    assert difference(there / "model", here / "model") == 0.0
    assert workers_of(there) == []
