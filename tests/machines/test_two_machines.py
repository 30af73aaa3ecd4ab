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

import pytest

from aitrain.runs.checkpoint import checkpoints_of
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.run_list import look
from tests.machines.namespaces import ADDRESSES, Command, NamespaceMachine, Pair, cannot_make_machines, two_machines
from tests.training.test_resume import assert_same

WHY_NOT = cannot_make_machines() if "AITRAIN_MACHINES" in os.environ else "they take minutes: .ci/machines"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"two machines are not made here: {WHY_NOT}")

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
LOST = "node 1 (nodeB, 10.77.0.2)"


@pytest.fixture(scope="module")
def options(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run whose result depends on the random state of every rank: its dropout."""
    environment = tmp_path_factory.mktemp("environment") / "held.py"
    environment.write_text(HELD)
    return [
        *(
            f"--model={small_model}",
            f"--rl-env={environment}:Held",
            "--max-steps=6",
            "--rl-max-new-tokens=4",
        ),
        *("--peft", "--lora-r=4", "--lora-dropout=0.3", "--lr=1e-3", "--rl-kl-coef=0", "--output-dir=runs"),
        *("--save-strategy=steps", "--save-steps=2", "--save-total-limit=9", "--project-name=run"),
    ]


@pytest.fixture(scope="module")
def local(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two processes on one machine."""
    folder = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "aitrain", "grpo", *options, "--num-processes=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two machines with one folder; at the end nothing runs on those that are left."""
    with two_machines(tmp_path, NamespaceMachine("nodeA"), NamespaceMachine("nodeB")) as pair:
        yield pair
        assert pair.left() == []


def train(pair: Pair, *flags: str, **variables: str) -> tuple[Command, Command]:
    """Start the command on both machines."""
    nodes = ("--nnodes=2", f"--master-addr={ADDRESSES['nodeA']}")
    first, second = (pair.start(node, "grpo", *flags, *nodes, f"--node-rank={node}", **variables) for node in (0, 1))
    return first, second


def held(pair: Pair, run: Path, *flags: str) -> tuple[Command, Command]:
    """The same, when the run waits in its fourth step, with a checkpoint, and the heartbeat has all processes."""
    commands = train(pair, *flags, HELD=str(run))
    deadline = time.monotonic() + 240
    while not checkpoints_of(RunFolder(run)) or not all(node.pids for node in look(run).nodes):
        ended = [command.end() for command in commands if command.process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return commands


def test_two_machines_train_like_two_processes_of_one(
    pair: Pair, options: list[str], local: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    commands = held(pair, run, *options)
    seen = look(run)
    assert (seen.status, seen.host) == ("running", "nodeA")
    assert [(node.host, node.address, len(node.pids)) for node in seen.nodes] == [
        (name, address, 1) for name, address in ADDRESSES.items()
    ]
    (run.parent / "go").touch()
    ends = [command.end() for command in commands]

    assert [code for code, _ in ends] == [0, 0], ends
    assert_same(local, run)


def test_a_machine_that_is_killed_is_named_and_the_run_is_resumed_without_it_having_been_lost(
    pair: Pair, options: list[str], local: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    commands = held(pair, run, *options)
    pair.machines[1].kill()
    code, error = commands[0].end()

    assert code == 1
    assert f"{LOST} is gone" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert look(run).status == "failed"
    commands[1].end()
    assert pair.left() == []
    pair.machines[0].kill()
    with two_machines(tmp_path, NamespaceMachine("nodeA"), NamespaceMachine("nodeB")) as others:
        ends = [command.end() for command in train(others, "--config", str(run / "config.yaml"), "--resume")]
    assert [code for code, _ in ends] == [0, 0], ends
    assert_same(local, run)


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(pair: Pair, options: list[str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    commands = held(pair, run, *options, "--max-steps=500", "--ddp-timeout=8")
    pair.cut()
    (run.parent / "go").touch()
    (first, error), (second, other) = (command.end() for command in commands)

    assert (first, second) == (1, 1), (error, other)
    assert LOST in error
    assert "node 0 (" in other
    assert "--resume" in error
