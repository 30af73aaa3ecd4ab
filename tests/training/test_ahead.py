"""Batches that are played while another one trains: their places, versions, failures, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain.batch import CaseSchedule
from aitrain.engines.server import CompletionGate
from aitrain.errors import ServerFailed
from aitrain.events import SERVER_VARIABLE
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.event_loop import ThreadLoop
from aitrain.runs.rollout_record import read_rollouts
from aitrain.training.batch_source import AheadSource, BatchPlaces
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.training_batch import TrainingBatch
from tests.training.small_server import SmallServer
from tests.training.test_resume import as_if_killed_after, assert_same
from tests.training.test_served_run import Start, server, start

__all__ = ["server", "start"]  # fixtures

# -- places


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 3])
def test_the_place_after_a_batch_is_the_one_that_the_training_asks_for(updates: int, start: int) -> None:
    """From step 3 on it is a training that was resumed with other settings."""
    schedule = CaseSchedule(cases=1000, prompts=2, updates=updates, epochs=1)
    places, following = BatchPlaces(schedule, count=4, rank=1), None
    for number in range(40):
        place = places.at(start + number * updates)
        assert place.places == range(4, 8)
        assert start or place.index == number
        assert following in (None, place)
        following = places.after(place)


# -- when batches are played


@dataclass
class Engine:
    """A policy whose steps are counted, and a server that gets its weights."""

    step: int = 0
    weight_version: int = 0
    loads: list[int] = field(default_factory=list)
    gate: CompletionGate = field(default_factory=CompletionGate)
    settled: int = 0

    @property
    def fleet(self) -> Engine:
        return self

    async def settle(self) -> None:
        self.settled += 1


@dataclass
class Rollouts:
    """What a source asks of PolicyRollouts."""

    server: Engine
    loop: ThreadLoop
    weight_version: Any = None
    settle: Any = None
    loads_weights: bool = True
    rollout: Any = field(default_factory=lambda: SimpleNamespace(clock=RolloutClock()))
    accelerator: Any = field(
        default_factory=lambda: SimpleNamespace(
            device="cpu", reduce=lambda value, reduction: value, wait_for_everyone=lambda: None
        )
    )

    server_version = PolicyRollouts.server_version

    def load_weights(self) -> None:
        if self.server.weight_version != self.server.step:
            self.server.weight_version = self.server.step
            self.server.loads.append(self.server.step)


class Completion:
    """Gives each batch its index as cases, and completes nothing."""

    order = SimpleNamespace(batch=lambda index: [index, index], state=dict)

    def complete(self, batch: TrainingBatch) -> None:
        pass


class Source(AheadSource):
    """Plays a batch of two turns, each when the test lets it."""

    started: Any
    turns: Any
    is_held: Any

    def play(self, place: Any, rollouts: Any) -> TrainingBatch:
        batch = TrainingBatch(place.step, place.places, 2, [place.index] * 4, [], index=place.index)
        batch.weight_version = rollouts.weight_version()
        self.started.append((place.index, rollouts.weight_version(), threading.current_thread()))
        versions = []
        for _ in range(2):
            turn = self.turns.pop(0) if self.turns else None
            if isinstance(turn, Exception):
                raise turn
            versions.append(rollouts.loop.run(self.turn(rollouts.server, turn)))
        batch.metrics = dict(enumerate(versions))  # type: ignore[arg-type]
        return batch

    async def turn(self, server: Engine, may_end: threading.Event | None) -> int:
        async def complete() -> int:
            version = server.weight_version
            if may_end is not None:
                self.is_held.set()
                await asyncio.to_thread(may_end.wait, 60)
            assert server.weight_version == version  # within a completion weights do not change
            return version

        return await server.gate.run(complete())


@pytest.fixture
def source() -> Iterator[Source]:
    loop = ThreadLoop()
    places = BatchPlaces(CaseSchedule(8, prompts=2, updates=1, epochs=1, max_steps=4), 4, 0)
    made = Source(Rollouts(Engine(), loop), [], Completion(), 2, places)  # type: ignore[arg-type]
    made.started, made.turns, made.is_held = [], [], threading.Event()
    yield made
    made.settle()
    loop.close()


def train(source: Any, steps: range) -> list[TrainingBatch]:
    taken = []
    for step in steps:
        taken.append(source.take(source.places.at(step)))
        source.rollouts.server.step += 1
    return taken


def test_each_batch_has_the_weights_from_before_the_step_that_trains_beside_it(source: Source) -> None:
    taken = train(source, range(4))
    assert [(batch.step, batch.weight_version) for batch in taken] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert [index for index, _, _ in source.started] == [0, 1, 2, 3]  # and none for a fifth step
    assert all(thread is not threading.current_thread() for *_, thread in source.started)


def test_between_the_turns_of_a_batch_that_training_waits_for_weights_are_loaded(source: Source) -> None:
    source.loads_between_turns = True
    may_end, server = threading.Event(), source.rollouts.server
    source.turns = [None, None, may_end]
    train(source, range(1))
    before, close = server.settled, server.gate.close  # type: ignore[union-attr]

    async def closed() -> None:
        closing = asyncio.ensure_future(close())
        await asyncio.sleep(0)
        may_end.set()
        await closing

    server.gate.close = closed  # type: ignore[union-attr,method-assign]
    assert source.is_held.wait(60)
    (second,) = train(source, range(1, 2))
    assert (second.weight_version, second.metrics) == (0, {0: 0, 1: 1})
    assert server.settled == before + 1  # type: ignore[union-attr]
    assert train(source, range(2, 3))[0].weight_version == 1


def test_a_failure_of_the_thread_is_raised_by_the_training_and_not_by_a_checkpoint(source: Source) -> None:
    source.turns = [None, None, ServerFailed("it is gone")]
    train(source, range(1))
    assert source.waiting() is None
    with pytest.raises(ServerFailed, match="it is gone"):
        train(source, range(1, 2))


def test_held_out_cases_wait_for_the_thread(source: Source) -> None:
    may_end, has_settled = threading.Event(), threading.Event()
    source.turns = [None, None, None, may_end]
    train(source, range(1))
    threading.Thread(target=lambda: (source.rollouts.settle(), has_settled.set())).start()
    assert not has_settled.wait(0.05)
    may_end.set()
    assert has_settled.wait(60)
    assert source.waiting() is source.take(source.places.at(1))


def test_a_source_continues_with_the_batch_of_a_checkpoint(source: Source) -> None:
    batch = TrainingBatch(2, range(4), 2, [2] * 4, [], index=2)
    source.restore(batch)
    source.rollouts.server.step = 2
    assert source.take(source.places.at(2)) is batch
    assert source.rollouts.server.loads == [2]
    assert source.waiting() is not None
    assert [(index, version) for index, version, _ in source.started] == [(3, 2)]


# -- the gate


def test_a_closed_gate_has_waited_for_completions_and_holds_the_next_ones_back() -> None:
    order: list[str] = []

    async def complete(name: str) -> None:
        order.append(name)
        await asyncio.sleep(0.01)
        order.append(f"{name} ends")

    async def play() -> None:
        gate = CompletionGate()
        first = asyncio.create_task(gate.run(complete("first")))
        await asyncio.sleep(0)
        await gate.close()
        second = asyncio.create_task(gate.run(complete("second")))
        await asyncio.sleep(0.01)
        order.append("open")
        await gate.open()
        await asyncio.gather(first, second)

    asyncio.run(play())
    assert order == ["first", "first ends", "open", "second", "second ends"]


# -- whole runs


@pytest.mark.slow
def test_a_run_that_samples_ahead_and_is_resumed_ends_as_if_it_was_never_stopped(
    start: Start, server: SmallServer
) -> None:
    """On two ranks; dropout, refilled batches and an evaluation between are part of it."""
    run = start(
        rl_ahead=1, peft=True, processes=2, save_strategy="steps", save_steps=1, save_total_limit=None,
        eval_strategy="steps", eval_steps=2, rl_max_episode_tokens=300, max_steps=4, lora_dropout=0.2,
        rl_sampling="refill", rl_refill_limit=1,
    )  # fmt: skip
    assert run.end() == []
    files = sorted(run.folder.rollouts.glob("*.jsonl"))
    records = [record for file in files for record in read_rollouts(file) if not record.eval_phase]
    assert {(record.step, record.weight_version) for record in records} == {(1, 0), (2, 0), (3, 1), (4, 2)}
    assert all(turn.weight_version == record.weight_version for record in records for turn in record.turns)

    whole = run.folder.path.with_name("whole")
    killed = as_if_killed_after(run.folder.path, 2, "killed")
    run.folder.path.rename(whole)
    killed.rename(run.folder.path)
    again = [*run.process.args, str(run.folder.checkpoints / "checkpoint-2")]  # type: ignore[misc]
    environment = {**os.environ, SERVER_VARIABLE: server.url, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(again, cwd=whole.parent, env=environment, stdout=subprocess.DEVNULL, check=True)
    assert_same(run.folder.path, whole)
