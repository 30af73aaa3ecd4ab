"""A run on two machines: equal to one with two processes here, and what becomes of it when a machine fails.

The machines are namespaces (namespaces.py), which need root. `.ci/machines` runs these tests, in a step of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.checkpoint import checkpoints_of
from aitrain.runs.run_folder import RunFolder, read_object
from tests.machines.namespaces import ADDRESSES, Network, cannot_make_machines, end_of, network
from tests.training.test_resume import assert_same

WHY_NOT = cannot_make_machines() if "AITRAIN_MACHINES" in os.environ else "they take minutes: .ci/machines"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"two machines are not made here: {WHY_NOT}")

Command = subprocess.Popen[str]
HELD = '''
import os, time
from pathlib import Path

class Held:
    """In the fourth step it waits, where the run folder is told, until the test has looked: a file `go` beside it."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}"} for number in range(64)]

    def build_eval_dataset(self, tokenizer):
        return [{"prompt": "say it"}]

    def score_episode(self, completion):
        run = Path(os.environ.get("HELD", "nowhere"))
        while (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count('"reward"') >= 3:
            if (run.parent / "go").exists():
                break
            time.sleep(0.02)
        return sum(letter < "n" for letter in completion) / max(1, len(completion))
'''
LOST = "node 1 (node2, 10.77.0.2)"


@pytest.fixture(scope="module")
def options(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run whose result depends on the random state of every rank: its dropout."""
    environment = tmp_path_factory.mktemp("environment") / "held.py"
    environment.write_text(HELD)
    return [
        f"--model={small_model}", f"--rl-env={environment}:Held", "--max-steps=6", "--rl-max-new-tokens=4", "--peft",
        "--lora-r=4", "--lora-dropout=0.3", "--lr=1e-3", "--rl-kl-coef=0", "--output-dir=runs", "--save-strategy=steps",
        "--save-steps=2", "--save-total-limit=9", "--project-name=run",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def local(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two processes on one machine."""
    folder = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "aitrain", "grpo", *options, "--num-processes=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Network]:
    """Two machines with one folder; at the end nothing runs on those that are left."""
    with network(tmp_path) as pair:
        yield pair
        assert pair.left() == []


def train(pair: Network, *flags: str, **variables: str) -> list[Command]:
    """Start the command on both machines."""
    nodes = ("--nnodes=2", f"--master-addr={ADDRESSES['node1']}")
    return [
        machine.aitrain("grpo", *flags, *nodes, f"--node-rank={rank}", **variables)
        for rank, machine in enumerate(pair.machines)
    ]


def status_of(run: Path) -> dict[str, Any]:
    return read_object(RunFolder(run).status)


def held(pair: Network, run: Path, *flags: str) -> list[Command]:
    """The same, when the run waits in its fourth step, with a checkpoint."""
    commands = train(pair, *flags, HELD=str(run))
    deadline = time.monotonic() + 240
    while not checkpoints_of(RunFolder(run)):
        ended = [end_of(command) for command in commands if command.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return commands


def test_a_machine_that_is_killed_is_named_and_the_resumed_run_equals_one_with_two_processes_here(
    pair: Network, options: list[str], local: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    commands = held(pair, run, *options)
    assert status_of(run)["status"] == "running"
    assert [(node["host"], node["address"], node["processes"]) for node in status_of(run)["nodes"]] == [
        ("node1", "10.77.0.1", 1), ("node2", "10.77.0.2", 1),
    ]  # fmt: skip
    pair.machines[1].kill()
    code, error = end_of(commands[0])

    assert code == 1
    assert f"{LOST} is gone" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert status_of(run)["status"] == "failed"
    end_of(commands[1])
    assert pair.left() == []
    pair.machines[0].kill()
    with network(tmp_path) as others:
        ends = [end_of(command) for command in train(others, "--config", str(run / "config.yaml"), "--resume")]
    assert [code for code, _ in ends] == [0, 0], ends
    assert_same(local, run)


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(pair: Network, options: list[str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    commands = held(pair, run, *options, "--max-steps=500", "--ddp-timeout=60")
    pair.cut()
    (run.parent / "go").touch()
    (first, error), (second, other) = (end_of(command) for command in commands)

    assert (first, second) == (1, 1), (error, other)
    assert LOST in error
    assert "node 0 (" in other
    assert "--resume" in error
