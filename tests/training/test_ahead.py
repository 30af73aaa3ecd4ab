"""Batches that are played while another one trains: their places, versions, failures, and resumed runs."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain.batch import CaseSchedule
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.event_loop import ThreadLoop
from aitrain.runs.rollout_record import read_rollouts
from aitrain.runs.run_folder import RunFolder
from aitrain.training.batch_source import AheadSource
from aitrain.training.case_order import UniformOrder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import TrainingBatch
from tests.training.small_server import SmallServer
from tests.training.test_processes import Command, command
from tests.training.test_resume import as_if_killed_after
from tests.training.test_served_run import server

__all__ = ["command", "server"]  # fixtures

# -- when batches are played


@dataclass
class Engine:
    """A policy whose steps are counted, and a server that gets its weights."""

    step: int = 0
    weight_version: int = 0


@dataclass
class Rollouts:
    """What a source asks of PolicyRollouts."""

    server: Engine
    loop: ThreadLoop
    weight_version: Any = None
    settle: Any = None
    loads_weights: bool = True
    rollout: Any = field(default_factory=lambda: SimpleNamespace(clock=RolloutClock()))

    server_version = PolicyRollouts.server_version

    def load_weights(self) -> None:
        self.server.weight_version = self.server.step


class Source(AheadSource):
    """Plays a batch of two turns, each when the test lets it."""

    started: Any
    turns: Any

    def play(self, step: int, rollouts: Any) -> TrainingBatch:
        batch = TrainingBatch(step, [], [], [])
        batch.weight_version = rollouts.weight_version()
        self.started.append((self.index_of(step), rollouts.weight_version(), threading.current_thread()))
        version = rollouts.server.weight_version
        for _ in range(2):
            turn = self.turns.pop(0) if self.turns else None
            if turn is not None:
                rollouts.loop.run(asyncio.to_thread(turn.wait, 60))
        assert rollouts.server.weight_version == version
        self.order.others([0], ())
        return batch


@pytest.fixture
def source() -> Iterator[Source]:
    loop = ThreadLoop()
    schedule = CaseSchedule(8, prompts=2, updates=1, epochs=1, max_steps=4)
    made = Source(Rollouts(Engine(), loop), [], UniformOrder(8, 2, None), schedule, 2)  # type: ignore[arg-type]
    made.started, made.turns = [], []
    yield made
    made.settle()
    loop.close()


def train(source: Any, steps: range) -> list[TrainingBatch]:
    taken = []
    for step in steps:
        taken.append(source.take(step))
        source.rollouts.server.step += 1
    return taken


def test_each_batch_has_the_weights_from_before_the_step_that_trains_beside_it(source: Source) -> None:
    taken = train(source, range(4))
    assert [(batch.step, batch.weight_version) for batch in taken] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert [index for index, _, _ in source.started] == [0, 1, 2, 3]  # and none for a fifth step
    assert all(thread is not threading.current_thread() for *_, thread in source.started)


def test_held_out_cases_and_checkpoints_wait_for_the_batch_that_is_played(source: Source) -> None:
    may_end = threading.Event()
    source.turns = [None, None, None, may_end]
    train(source, range(1))
    threading.Timer(0.05, may_end.set).start()
    source.rollouts.settle()
    assert may_end.is_set()


def test_a_checkpoint_has_the_order_of_the_cases_without_the_batch_that_is_played_ahead(source: Source) -> None:
    """A resumed run chooses the same cases for it again."""
    for step in range(3):
        train(source, range(step, step + 1))
        source.settle()
        assert source.order_state() == {"replacing": step + 1}
        assert source.order.state() == {"replacing": step + 2}


def test_a_training_that_was_resumed_between_two_batches_takes_the_next_one_and_then_all_others(source: Source) -> None:
    source.schedule = CaseSchedule(8, prompts=2, updates=2, epochs=1, max_steps=9)
    for step in (3, 5, 7):
        source.take(step)
    assert [index for index, _, _ in source.started] == [2, 3, 4]


# -- whole runs


@pytest.mark.slow
def test_a_run_that_samples_ahead_and_is_killed_trains_on_the_same_cases(command: Command, server: SmallServer) -> None:
    """On two ranks: the batch that was played ahead is sampled again, with the weights of the checkpoint."""
    done = command.run(
        "Slow", "--use-vllm", "--vllm-mode=server", f"--vllm-server-url={server.url}", "--rl-ahead=1", "--max-steps=4",
        "--num-processes=2", "--peft", "--lora-dropout=0.2", "--save-strategy=steps", "--save-steps=1",
        "--save-total-limit=9", "--eval-strategy=steps", "--eval-steps=2", "--rl-max-episode-tokens=300",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = RunFolder(command.folder / "run")
    versions, cases = trained(whole)
    assert versions == {(1, 0), (2, 0), (3, 1), (4, 2)}

    killed = as_if_killed_after(whole.path, 2, "killed")
    resume = [*command.aitrain, "grpo", "--config", str(killed / "config.yaml"), "--resume"]
    subprocess.run(resume, cwd=command.folder, stdout=subprocess.DEVNULL, check=True)
    assert trained(RunFolder(killed)) == ({(1, 0), (2, 0), (3, 2), (4, 2)}, cases)


def trained(folder: RunFolder) -> tuple[set[tuple[int, int]], list[tuple[int, int | None, object]]]:
    """Step and weight version of all episodes in training, and step, group and case of each."""
    files = sorted(folder.rollouts.glob("*.jsonl"))
    records = [record for file in files for record in read_rollouts(file) if not record.eval_phase]
    assert all(turn.weight_version == record.weight_version for record in records for turn in record.turns)
    cases = sorted((record.step, record.group, record.case_idx) for record in records)
    return {(record.step, record.weight_version) for record in records}, cases
