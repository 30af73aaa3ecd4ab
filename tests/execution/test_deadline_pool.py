"""Many calls at the same time, each with a deadline: nothing that one of them does hangs or fails another."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from aitrain.execution import async_calls, deadline_pool
from aitrain.execution.async_calls import run_if_async, shared_loop
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.failure import Failure
from aitrain.execution.task import Outcome, current_task, paused
from tests.execution.waiting import Clock, at_deadline, eventually

LONG = 60.0
"""Seconds that nothing here should come near."""
SHORT = 0.05
"""The deadline of calls that hang."""
FOREIGN: set[threading.Thread] = set()
"""Threads that were there before the test."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a test leaves behind would be in the way of the next; a call of another file's test may hang still."""
    FOREIGN.clear()
    FOREIGN.update(threading.enumerate())
    yield
    assert eventually(lambda: not threads())


def threads() -> list[threading.Thread]:
    own = [thread for thread in threading.enumerate() if thread not in FOREIGN]
    return [thread for thread in own if thread.name == "environment-call"]


def one(pool: Any, job: Callable[[], Any]) -> Outcome[Any]:
    (outcome,) = pool.call_all([job])
    return outcome


def failure(outcome: Outcome[Any]) -> Failure:
    assert outcome.failure is not None
    assert outcome.value is None
    return outcome.failure


# -- failures


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


@pytest.mark.parametrize(
    "error",
    [TimeoutError("of its own"), SystemExit(3), asyncio.CancelledError(), StopIteration(), Unspeakable()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_call_raises_is_its_failure(error: BaseException) -> None:
    def fail() -> None:
        raise error

    pool = DeadlinePool(2, LONG)
    failed, other = pool.call_all([fail, lambda: 1])

    assert failure(failed).kind == "raised"
    assert failure(failed).message.startswith(f"raised: {type(error).__name__}")
    assert other.value == 1
    assert one(pool, lambda: 2).value == 2


# -- deadlines


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_whose_thread_ends_before_it_begins_is_made_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python ends a thread that starts while another one sets a trace function."""
    monkeypatch.setattr(deadline_pool, "POLL", 0.01)

    refused = list[threading.Thread]()

    def refuse_the_first(*_: object) -> None:
        if threading.current_thread().name == "environment-call" and not refused:
            refused.append(threading.current_thread())
            raise RuntimeError("Cannot install a trace function while another trace function is being installed")

    threading.settrace(refuse_the_first)
    try:
        assert one(DeadlinePool(1, LONG), lambda: 7).value == 7
    finally:
        threading.settrace(None)
    assert refused


def test_a_call_that_hangs_times_out_and_its_thread_is_replaced_and_counted_until_it_ends(
    clock: Clock, over: threading.Event
) -> None:
    pool, hangs, late = DeadlinePool(1, SHORT), threading.Event(), list[Any]()
    assert (pool.abandoned, pool.last_hang) == (0, "")

    def hang() -> str:
        with suppress(BaseException):
            over.wait(hangs.set())  # here it hangs
        late.append(sys.exc_info())
        return "late"

    hung = at_deadline(clock, pool, hang, hangs.is_set)
    told = failure(hung)

    assert told.kind == "timed_out"
    first, second = told.message.split("\n")
    assert first == "timed out: no answer within 0.05 s"
    assert re.fullmatch(r"at .*test_deadline_pool\.py, line \d+, in hang: .*  # here it hangs", second)
    assert "threading.py" in told.trace
    assert hung.is_running
    assert (pool.abandoned, pool.last_hang) == (1, second)
    (hanging,) = threads()
    assert hanging not in {outcome.value for outcome in pool.call_all([threading.current_thread] * 3)}

    over.set()
    assert eventually(lambda: pool.abandoned == 0)
    assert eventually(lambda: hanging not in threads())
    assert late == [(None, None, None)], "nothing is raised in it"


def test_a_process_with_a_hung_thread_ends_when_its_work_is_done() -> None:
    code = (
        "import asyncio, threading\n"
        "from aitrain.execution.deadline_pool import DeadlinePool\n"
        "pool = DeadlinePool(2, 0.1)\n"
        "print(asyncio.run(pool.call(threading.Event().wait)).failure.kind, pool.abandoned)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("timed_out 1\n", "")


# -- the clock


def test_a_call_is_charged_for_its_own_time_and_not_for_waiting(clock: Clock) -> None:
    def work() -> tuple[float, float]:
        task = current_task.get()
        assert task is not None
        clock.now += 5
        before = task.left()
        with paused():
            clock.now += 100
            with paused():
                clock.now += 100
            clock.now += 100
        clock.now += 2
        return before, task.left()

    first, queued = DeadlinePool(1, timeout=60).call_all([work, work])

    assert first.value == queued.value == (55, 53)
    assert first.seconds == queued.seconds == 7
    with paused():
        pass  # outside of a call


# -- async calls


def test_async_calls_run_together_on_one_loop_which_the_first_ones_agree_on() -> None:
    all_threads, arrived, everybody = threading.Barrier(8), list[int](), asyncio.Event()
    async_calls._loops.clear()

    async def meet() -> Any:
        arrived.append(1)
        if len(arrived) == 8:
            everybody.set()
        await everybody.wait()
        return asyncio.get_running_loop()

    outcomes = DeadlinePool(8, LONG).call_all([lambda: all_threads.wait(LONG) * 0 or meet()] * 8)

    assert {outcome.value for outcome in outcomes} == {shared_loop()}


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_async_call_that_hangs_is_cancelled_and_its_thread_and_loop_go_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    monkeypatch.setattr(async_calls, "ANSWER_SECONDS", LONG)  # also on a loaded machine
    pool, hangs, cancelled, loop = DeadlinePool(1, SHORT), list[int](), threading.Event(), shared_loop()

    async def inner() -> None:
        try:
            await asyncio.sleep(1000, hangs.append(1))  # forever
        finally:
            cancelled.set()

    async def outer() -> None:
        await inner()

    def called() -> Any:
        with suppress(Exception):  # has timed out all the same
            return [run_if_async(asyncio.sleep(0, 1)), run_if_async(outer())]

    hung = at_deadline(clock, pool, called if is_inside else outer, lambda: hangs)

    assert failure(hung).kind == "timed_out"
    assert failure(hung).message.endswith("in inner: await asyncio.sleep(1000, hangs.append(1))  # forever")
    assert "in outer" in failure(hung).trace
    assert not hung.is_running
    assert cancelled.wait(LONG)
    assert pool.abandoned == 0
    assert one(pool, lambda: 1).value == 1
    assert shared_loop() is loop


def test_a_blocked_loop_is_replaced(clock: Clock, over: threading.Event) -> None:
    pool, blocks, stuck = DeadlinePool(2, SHORT), threading.Event(), shared_loop()

    async def block() -> None:
        over.wait(blocks.set())

    async def fine() -> int:
        await asyncio.sleep(0)
        return 1

    blocked = failure(at_deadline(clock, pool, block, blocks.is_set))

    assert blocked.kind == "timed_out"
    assert blocked.message.endswith("in block: over.wait(blocks.set())")
    assert [outcome.value for outcome in pool.call_all([fine] * 4)] == [1] * 4
    assert shared_loop() is not stuck


# -- awaited


def test_calls_whose_awaiting_tasks_are_cancelled_are_abandoned(over: threading.Event) -> None:
    pool, ended, ran = DeadlinePool(2, LONG), threading.Event(), list[int]()

    async def hang() -> None:
        try:
            await asyncio.sleep(1000, ran.append(1))
        finally:
            ended.set()

    async def main() -> None:
        calls = [asyncio.ensure_future(pool.call(job)) for job in (lambda: over.wait(ran.append(2)), hang)]
        while len(ran) < 2:
            await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(pool.call(lambda: ran.append(3))))
        asyncio.get_running_loop().call_soon(lambda: [call.cancel() for call in reversed(calls)])
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        assert (await pool.call(lambda: 2)).value == 2

    asyncio.run(main())
    assert ended.wait(LONG), "what it awaited is cancelled"
    assert sorted(ran) == [1, 2], "what has not started never runs"
    over.set()
    assert eventually(lambda: pool.abandoned == 0)
