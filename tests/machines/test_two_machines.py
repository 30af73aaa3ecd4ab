"""A run on two machines: equal to one with two processes here, and what becomes of it when a machine fails.

The machines are namespaces (namespaces.py), which need root. `.ci/machines` runs these tests, in a step of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aitrain.runs.checkpoint import checkpoints_of
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.runs.run_list import look
from tests.machines.namespaces import ADDRESSES, Command, NamespaceMachine, Pair, cannot_make_machines, two_machines
from tests.training.test_resume import assert_same

WHY_NOT = cannot_make_machines() if "AITRAIN_MACHINES" in os.environ else "they take minutes: .ci/machines"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"two machines are not made here: {WHY_NOT}")

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "processes.py"
STEPS, SAVED = 8, 2
"""Steps of a run, and the step with its first checkpoint."""
LOST = "node 1 (nodeB, 10.77.0.2)"

Start = Callable[..., Pair]


@pytest.fixture(scope="module")
def options(small_model: Path) -> list[str]:
    """A run whose result depends on the random state of every rank: its dropout."""
    return [
        *(f"--model={small_model}", f"--rl-env={ENVIRONMENT}:Slow", f"--max-steps={STEPS}", "--rl-max-new-tokens=4"),
        *("--peft", "--lora-r=4", "--lora-dropout=0.3", "--lr=1e-3", "--rl-kl-coef=0", "--output-dir=runs"),
        *("--save-strategy=steps", f"--save-steps={SAVED}", "--save-total-limit=9"),
    ]


@pytest.fixture(scope="module")
def local(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two processes on one machine."""
    folder = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "aitrain", "grpo", *options, "--num-processes=2", "--project-name=run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(second=...)`: two machines with one folder, until the end of the test, when nothing runs on them."""
    with ExitStack() as stack:

        def machines(first: NamespaceMachine | None = None, second: NamespaceMachine | None = None) -> Pair:
            pair = (first or NamespaceMachine("nodeA"), second or NamespaceMachine("nodeB"))
            return stack.enter_context(two_machines(tmp_path, *pair))

        yield machines


def train(pair: Pair, *flags: str, address: str = ADDRESSES["nodeA"], **variables: str) -> tuple[Command, Command]:
    """Start the command on both machines."""
    nodes = ("--nnodes=2", f"--master-addr={address}", "--project-name=run")
    first, second = (pair.start(node, "grpo", *flags, *nodes, f"--node-rank={node}", **variables) for node in (0, 1))
    return first, second


def wait_for_checkpoint(pair: Pair, commands: tuple[Command, ...], run: Path) -> None:
    """Until there is one, and the run is in a later step."""
    deadline, metrics = time.monotonic() + 120, run / "metrics.jsonl"
    while not checkpoints_of(RunFolder(run)) or not any(line["step"] > SAVED for line in read_lines(metrics)):
        ended = [command.end() for command in commands if command.process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_resumes(pair: Pair, local: Path, run: Path, **variables: str) -> None:
    """The command that a failed run prints, on both machines, ends like a run that never failed."""
    given = ("grpo", "--config", str(run / "config.yaml"), "--resume")
    nodes = ("--nnodes=2", f"--master-addr={ADDRESSES['nodeA']}")
    resumed = [pair.start(node, *given, *nodes, f"--node-rank={node}", **variables) for node in (0, 1)]
    ends = [command.end() for command in resumed]
    assert [code for code, _ in ends] == [0, 0], ends
    assert_same(local, run)


def test_two_machines_train_like_two_processes_of_one(
    start: Start, options: list[str], local: Path, tmp_path: Path
) -> None:
    pair, run = start(), tmp_path / "runs" / "run"
    commands = train(pair, *options)
    wait_for_checkpoint(pair, commands, run)
    while not all(node.pids for node in look(run).nodes) and commands[0].process.poll() is None:
        time.sleep(0.05)  # the next heartbeat has them
    seen = look(run)
    assert (seen.status, seen.host) == ("running", "nodeA")
    assert [(node.host, node.address, len(node.pids)) for node in seen.nodes] == [
        (name, address, 1) for name, address in ADDRESSES.items()
    ]
    ends = [command.end() for command in commands]

    assert [code for code, _ in ends] == [0, 0], ends
    assert_same(local, run)
    assert pair.left() == []


def test_a_machine_that_is_killed_is_named_and_the_run_is_resumed_without_it_having_been_lost(
    start: Start, options: list[str], local: Path, tmp_path: Path
) -> None:
    pair, run = start(), tmp_path / "runs" / "run"
    commands = train(pair, *options)
    wait_for_checkpoint(pair, commands, run)
    pair.machines[1].kill()
    code, error = commands[0].end()

    assert code == 1
    assert f"{LOST} is gone" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert pair.left() == []
    assert look(run).status == "failed"
    commands[1].end()
    assert_resumes(start(), local, run)


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(start: Start, options: list[str], tmp_path: Path) -> None:
    pair, run = start(), tmp_path / "runs" / "run"
    commands = train(pair, *options, "--max-steps=500", "--ddp-timeout=8")
    wait_for_checkpoint(pair, commands, run)
    pair.cut()
    (first, error), (second, other) = (command.end() for command in commands)

    assert (first, second) == (1, 1), (error, other)
    assert LOST in error
    assert "node 0 (" in other
    assert "--resume" in error
    assert pair.left() == []


def test_a_machine_that_is_asked_to_stop_ends_the_run_on_all_of_them(
    start: Start, options: list[str], tmp_path: Path
) -> None:
    """The machines' own names are loopback addresses, as Debian has them."""
    names = [NamespaceMachine(name, is_on_loopback=True) for name in ADDRESSES]
    pair, run = start(*names), tmp_path / "runs" / "run"
    commands = train(pair, *options, "--max-steps=500", address="nodeA")
    wait_for_checkpoint(pair, commands, run)
    commands[0].send(signal.SIGTERM)
    (first, error), (second, other) = (command.end() for command in commands)

    assert (first, second) == (130, 130), (error, other)
    assert "Continue on all machines, each with its own --node-rank:" in error
    assert look(run).status == "stopped"
    assert (run / "checkpoints" / f"checkpoint-{look(run).step}" / "manifest.json").exists()
    assert pair.left() == []


def test_a_machine_that_does_not_see_the_run_folder_is_named_on_both(
    start: Start, options: list[str], tmp_path: Path
) -> None:
    runs, apart = tmp_path / "runs", tmp_path / "apart"
    runs.mkdir()
    apart.mkdir()
    pair = start(second=NamespaceMachine("nodeB", mounts={runs: apart}))
    ends = [command.end() for command in train(pair, *options, AITRAIN_TOKEN="both know it")]
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("does not see" in error and "--output-dir" in error for _, error in ends), ends
    assert not [*runs.iterdir(), *apart.iterdir()]


def test_machines_that_differ_are_refused_before_anything_starts(
    start: Start, options: list[str], tmp_path: Path
) -> None:
    other_peft, other_env = tmp_path / "packages" / "peft-0.0.1.dist-info", tmp_path / "other.py"
    other_peft.mkdir(parents=True)
    (other_peft / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
    other_env.write_text(ENVIRONMENT.read_text() + "# changed\n")

    def refused(pair: Pair, **second: str) -> list[tuple[int, str]]:
        nodes = ("grpo", *options, "--nnodes=2", "--master-addr=10.77.0.1")
        commands = pair.start(0, *nodes, "--node-rank=0"), pair.start(1, *nodes, "--node-rank=1", **second)
        return [command.end() for command in commands]

    ends = refused(start(), PYTHONPATH=str(other_peft.parent))
    assert [code for code, _ in ends] == [2, 2], ends
    assert all(f"{LOST} differs from node 0: peft 0.0.1" in error for _, error in ends), ends
    ends = refused(start(second=NamespaceMachine("nodeB", mounts={ENVIRONMENT: other_env})))
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("differs from node 0: the environment's code" in error for _, error in ends), ends
    assert not list(tmp_path.glob("runs/*"))
