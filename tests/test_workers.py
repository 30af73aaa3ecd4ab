"""Many calls at the same time, each with a deadline: nothing that one of them does hangs or fails another."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import pytest

from aitrain.environment.contract import _loop, finished, run_async
from aitrain.environment.failures import CallFailed, Failure
from aitrain.environment.workers import Outcome, Workers, paused, remaining

LONG = 30.0
"""A deadline that nothing here should come near."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a test leaves behind would be in the way of the next."""
    yield
    assert eventually(lambda: not threads())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if re.fullmatch(r"environment-\d+", thread.name)]


def eventually(is_so: Callable[[], object], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def one(workers: Workers, job: Callable[[], Any]) -> Outcome:
    (outcome,) = workers.run([job])
    return outcome


def failure(outcome: Outcome) -> Failure:
    assert outcome.failure is not None
    assert outcome.value is None
    return outcome.failure


def spin() -> None:
    while True:
        pass  # here it hangs


# -- together


def test_results_come_in_the_order_of_the_jobs(workers: Any) -> None:
    def answer(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        return number

    outcomes = workers(5).run([lambda number=number: answer(number) for number in range(5)])

    assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert all(outcome.failure is None for outcome in outcomes)
    assert outcomes[0].seconds >= 0.1


def test_nothing_to_do_is_done_at_once(workers: Any) -> None:
    assert workers().run([]) == []
    assert threads() == []


def test_jobs_run_at_the_same_time(workers: Any) -> None:
    barrier = threading.Barrier(8)

    outcomes = workers(8).run([lambda: barrier.wait(LONG)] * 8)

    assert sorted(outcome.value for outcome in outcomes) == list(range(8))


def test_threads_are_reused_and_not_more_than_asked_for(workers: Any) -> None:
    pool, seen = workers(3), set()

    def note() -> None:
        time.sleep(0.001)
        seen.add(threading.current_thread().name)

    for _ in range(5):
        pool.run([note] * 20)

    assert seen == {"environment-1", "environment-2", "environment-3"}
    assert sorted(threads()) == sorted(seen)


def test_only_as_many_threads_are_made_as_there_are_jobs(workers: Any) -> None:
    workers(100).run([lambda: None] * 2)

    assert len(threads()) == 2


def test_close_leaves_no_thread(workers: Any) -> None:
    pool = workers(8)
    pool.run([lambda: None] * 8)
    assert len(threads()) == 8

    pool.close()

    assert threads() == []


def test_a_closed_pool_can_be_used_again(workers: Any) -> None:
    pool = workers()
    pool.close()

    assert one(pool, lambda: 1).value == 1


def test_what_a_job_sets_for_its_context_does_not_reach_the_next(workers: Any) -> None:
    from contextvars import ContextVar

    word: ContextVar[str] = ContextVar("word", default="nothing")
    pool = workers(1)

    one(pool, lambda: word.set("mine"))

    assert one(pool, word.get).value == "nothing"


def test_fewer_threads_do_as_well_when_the_system_has_no_more(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, itertools.count(1)

    def grudgingly(self: threading.Thread) -> None:
        if next(left) > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", grudgingly)
    running: list[int] = []

    outcomes = workers(8).run([lambda: 1] * 8, lambda now: running.append(now) or math.inf)

    assert [outcome.value for outcome in outcomes] == [1] * 8
    assert max(running) == 2


# -- failures


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
        CancelledError(), TimeoutError("mine"), StopIteration(), MemoryError(), BaseException("base"), Unspeakable(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_a_job_raises_is_its_failure(workers: Any, error: BaseException) -> None:
    def fail() -> None:
        raise error

    pool = workers(2)
    failed, other = pool.run([fail, lambda: 1])

    assert failure(failed).kind == "raised"
    assert failure(failed).message.startswith(f"raised: {type(error).__name__}")
    assert other.value == 1
    assert one(pool, lambda: 2).value == 2


def test_a_failure_names_the_users_line(workers: Any) -> None:
    def fail() -> None:
        raise ValueError("no such city")  # the line

    told = failure(one(workers(), fail))

    assert "raised: ValueError: no such city\nat " in told.message
    assert told.message.endswith('in fail: raise ValueError("no such city")  # the line')
    assert "Traceback" in told.trace


def test_a_failure_that_is_known_already_is_kept(workers: Any) -> None:
    known = Failure("crashed", "crashed: by itself")

    def fail() -> None:
        raise CallFailed(known)

    assert one(workers(), fail).failure is known


def test_a_timeout_of_the_users_own_is_no_deadline_of_ours(workers: Any) -> None:
    async def give_up() -> None:
        await asyncio.wait_for(asyncio.sleep(LONG), 0.01)

    assert failure(one(workers(), give_up)).kind == "raised"


# -- deadlines


def test_a_job_that_hangs_times_out_with_the_users_line(workers: Any) -> None:
    told = failure(one(workers(timeout=0.2), spin))

    assert told.kind == "timed_out"
    first, second = told.message.split("\n")
    assert first == "timed out: no answer within 0.2 s"
    assert re.fullmatch(r"at .*test_workers\.py, line \d+, in spin: (while True:|pass  # here it hangs)", second)
    assert "in spin" in told.trace


def test_the_line_is_the_users_also_where_python_waits(workers: Any) -> None:
    released = threading.Event()

    def hang() -> None:
        released.wait()

    told = failure(one(workers(timeout=0.2), hang))
    released.set()

    assert told.message.endswith("in hang: released.wait()")
    assert "threading.py" in told.trace


def test_a_job_that_hangs_holds_up_nothing_else(workers: Any) -> None:
    pool = workers(2, timeout=0.3)

    hung, *others = pool.run([spin, *[lambda: 1] * 6])

    assert failure(hung).kind == "timed_out"
    assert hung.seconds >= 0.3
    assert [other.value for other in others] == [1] * 6
    assert [outcome.value for outcome in pool.run([lambda: 2] * 6)] == [2] * 6


def test_the_threads_of_jobs_that_hang_are_replaced(workers: Any) -> None:
    pool = workers(2, timeout=0.2)

    outcomes = pool.run([spin, spin, *[lambda: 1] * 4])

    assert [outcome.value for outcome in outcomes] == [None, None, 1, 1, 1, 1]


def test_a_thread_that_hangs_in_python_ends_by_itself(workers: Any) -> None:
    def stubborn() -> None:
        while True:
            with suppress(Exception):
                spin()

    workers(1, timeout=0.2).run([stubborn])

    assert eventually(lambda: not threads())


def test_a_thread_that_returns_late_takes_no_other_job_and_is_not_heard(workers: Any) -> None:
    pool, released, late = workers(1, timeout=0.2), threading.Event(), []

    def hang() -> str:
        try:
            released.wait()
        except BaseException as error:
            late.append(error)
        return "late"

    hung = one(pool, hang)
    (hanging,) = threads()
    names = {outcome.value for outcome in pool.run([lambda: threading.current_thread().name] * 3)}
    released.set()

    assert hanging not in names
    assert eventually(lambda: hanging not in threads())
    assert failure(hung).kind == "timed_out"
    assert [type(error).__name__ for error in late] == ["_Abandoned"]


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_end_just_at_their_deadline_disturb_nothing(workers: Any, seed: int) -> None:
    """Whoever wins, there is an outcome, and no exception for an abandoned thread goes astray."""
    pool = workers(8, timeout=0.02)

    def close_to_it(number: int) -> int:
        until = time.perf_counter() + 0.018 + 0.0001 * ((number * 7 + seed) % 40)
        while time.perf_counter() < until:
            with paused():
                pass
        return number

    outcomes = pool.run([lambda number=number: close_to_it(number) for number in range(120)])

    for number, outcome in enumerate(outcomes):
        assert outcome.value == number or failure(outcome).kind == "timed_out"
    assert [outcome.value for outcome in Workers(8, LONG).run([])] == []
    pool.close()
    pool._timeout = LONG
    assert [outcome.value for outcome in pool.run([lambda: 1] * 50)] == [1] * 50


def test_a_queued_job_is_not_charged_for_waiting(workers: Any) -> None:
    def slow() -> int:
        time.sleep(0.25)
        return 1

    outcomes = workers(1, timeout=0.6).run([slow] * 4)

    assert [outcome.value for outcome in outcomes] == [1] * 4


def test_there_may_be_no_deadline(workers: Any) -> None:
    assert one(workers(timeout=math.inf), lambda: remaining()).value == math.inf


# -- the clock


def test_remaining_is_the_time_that_the_job_has_left(workers: Any) -> None:
    def look() -> tuple[float | None, float | None]:
        before = remaining()
        time.sleep(0.1)
        return before, remaining()

    before, after = one(workers(timeout=LONG), look).value

    assert 0 < after <= before - 0.1 < before <= LONG
    assert remaining() is None


def test_paused_time_is_not_charged(workers: Any) -> None:
    def patient() -> float | None:
        with paused():
            time.sleep(0.4)
            with paused():
                time.sleep(0.4)
            time.sleep(0.4)
            return remaining()

    outcome = one(workers(timeout=0.5), patient)

    assert outcome.failure is None
    assert outcome.value > 0
    assert outcome.seconds < 0.5


def test_the_clock_goes_on_after_a_pause(workers: Any) -> None:
    def patient() -> None:
        with paused():
            time.sleep(0.1)
        spin()

    outcome = one(workers(timeout=0.2), patient)

    assert failure(outcome).kind == "timed_out"
    assert outcome.seconds >= 0.2


def test_pausing_outside_of_a_job_does_nothing() -> None:
    with paused(), paused():
        assert remaining() is None


def test_what_an_async_job_waits_for_can_be_paused_too(workers: Any) -> None:
    async def ask() -> None:
        with paused():
            await asyncio.sleep(0.6)

    async def patient() -> float | None:
        await asyncio.gather(ask(), ask())
        return remaining()

    outcome = one(workers(timeout=0.4), patient)

    assert outcome.failure is None
    assert outcome.value > 0
    assert outcome.seconds < 0.4


# -- async jobs


def test_async_jobs_run_together_on_one_loop(workers: Any) -> None:
    arrived: set[int] = set()
    everybody: list[asyncio.Event] = []

    async def meet(number: int) -> Any:
        if not everybody:
            everybody.append(asyncio.Event())
        arrived.add(number)
        if len(arrived) == 16:
            everybody[0].set()
        await everybody[0].wait()
        return asyncio.get_running_loop()

    outcomes = workers(16).run([lambda number=number: meet(number) for number in range(16)])

    assert {outcome.value for outcome in outcomes} == {_loop()}


def test_the_first_async_jobs_agree_on_the_loop(workers: Any) -> None:
    async def which() -> Any:
        return asyncio.get_running_loop()

    for _ in range(10):
        _loop.cache_clear()
        barrier = threading.Barrier(8)

        def ask(barrier: threading.Barrier = barrier) -> Any:
            barrier.wait(LONG)
            return which()

        assert len({outcome.value for outcome in workers(8).run([ask] * 8)}) == 1


def test_an_async_job_that_hangs_is_cancelled_and_its_thread_goes_on(workers: Any) -> None:
    pool, cancelled = workers(2, timeout=0.3), threading.Event()

    async def inner() -> None:
        try:
            await asyncio.sleep(1000)  # forever
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def outer() -> None:
        await inner()

    pool.run([lambda: None] * 2)
    before = threads()
    hung, other = pool.run([outer, lambda: 1])

    assert failure(hung).kind == "timed_out"
    assert failure(hung).message.startswith("timed out: no answer within 0.3 s\nat ")
    assert failure(hung).message.endswith("in inner: await asyncio.sleep(1000)  # forever")
    assert "in outer" in failure(hung).trace
    assert cancelled.wait(LONG)
    assert other.value == 1
    assert threads() == before


def test_an_async_method_called_inside_a_job_has_its_deadline_too(workers: Any) -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> Any:
        return [finished(asyncio.sleep(0, 1)), finished(hang())]

    pool = workers(1, timeout=0.3)
    told = failure(one(pool, job))

    assert told.kind == "timed_out"
    assert told.message.endswith("in hang: await asyncio.sleep(1000)")
    assert len(threads()) == 1


def test_an_async_job_that_swallows_its_end_has_timed_out_all_the_same(workers: Any) -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> str:
        with suppress(Exception):
            finished(hang())
        return "never mind"

    assert failure(one(workers(1, timeout=0.2), job)).kind == "timed_out"


def test_a_job_that_goes_on_after_its_end_is_given_up(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.environment.workers.GRACE", 0.2)

    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> None:
        try:
            finished(hang())
        except Exception:
            spin()

    told = failure(one(workers(1, timeout=0.2), job))

    assert told.message.endswith("in hang: await asyncio.sleep(1000)")
    assert eventually(lambda: not threads())


def test_a_blocked_loop_is_replaced(workers: Any) -> None:
    released, stuck = threading.Event(), _loop()

    async def block() -> None:
        released.wait()

    async def fine() -> int:
        await asyncio.sleep(0)
        return 1

    pool = workers(2, timeout=0.5)
    blocked = failure(one(pool, block))
    later = [outcome.value for outcome in pool.run([fine] * 4)]
    released.set()

    assert blocked.kind == "timed_out"
    assert blocked.message.endswith("in block: released.wait()")
    assert later == [1] * 4
    assert _loop() is not stuck


def test_a_loop_that_only_waits_is_kept(workers: Any) -> None:
    before = _loop()

    workers(2, timeout=0.2).run([lambda: asyncio.sleep(1000)] * 2)

    assert _loop() is before


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    async def answer() -> int:
        return 7

    run_async(answer())
    pid = os.fork()
    if pid == 0:
        os._exit(run_async(answer()))

    status: list[int] = []
    assert eventually(lambda: status.append(os.waitpid(pid, os.WNOHANG)[1]) or os.waitstatus_to_exitcode(status[-1]))
    assert os.waitstatus_to_exitcode(status[-1]) == 7


# -- meanwhile


def test_meanwhile_is_told_how_many_are_running_and_unblocks_them(workers: Any) -> None:
    """As the model does: it answers when everybody that still runs waits for it."""
    pool = workers(6)
    waiting: list[threading.Event] = []
    sizes: list[int] = []

    def ask(turns: int) -> int:
        for _ in range(turns):
            answered = threading.Event()
            with paused():
                waiting.append(answered)
                pool.wake()
                assert answered.wait(LONG)
        return turns

    def answer(running: int) -> float:
        if len(waiting) == running:
            sizes.append(running)
            batch, waiting[:] = waiting[:], []
            for one in batch:
                one.set()
        return math.inf

    outcomes = pool.run([lambda turns=turns: ask(turns) for turns in range(6)], answer)

    assert [outcome.value for outcome in outcomes] == list(range(6))
    assert sizes == [5, 4, 3, 2, 1]


def test_meanwhile_is_called_again_after_the_time_it_says(workers: Any) -> None:
    enough = threading.Event()
    looked: list[int] = []

    def look(running: int) -> float:
        looked.append(running)
        if len(looked) == 5:
            enough.set()
        return 0.01

    assert workers().run([lambda: enough.wait(LONG)], look)[0].value is True
    assert looked[:5] == [1] * 5


def test_wake_makes_meanwhile_look(workers: Any) -> None:
    pool, rung, released = workers(), threading.Event(), threading.Event()

    def job() -> bool:
        time.sleep(0.1)
        rung.set()
        pool.wake()
        return released.wait(LONG)

    def look(running: int) -> float:
        if rung.is_set():
            released.set()
        return math.inf

    assert pool.run([job], look)[0].value is True


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_what_meanwhile_raises_is_raised_and_the_pool_stays_usable(workers: Any, error: BaseException) -> None:
    pool, started, ran_later = workers(1), threading.Event(), []

    def hang() -> None:
        started.set()
        spin()

    def fail(running: int) -> float:
        assert started.wait(LONG)
        raise error

    with pytest.raises(type(error)):
        pool.run([hang, lambda: ran_later.append(1)], fail)

    assert one(pool, lambda: 2).value == 2
    assert ran_later == []


def test_an_interrupted_run_cancels_what_is_awaited(workers: Any) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    def interrupt(running: int) -> float:
        if started.is_set():
            raise KeyboardInterrupt
        return 0.01

    with pytest.raises(KeyboardInterrupt):
        workers().run([hang], interrupt)

    assert cancelled.wait(LONG)


def test_runs_from_two_threads_take_turns(workers: Any) -> None:
    pool, outcomes = workers(2), []

    def run() -> None:
        outcomes.append([outcome.value for outcome in pool.run([lambda: time.sleep(0.01) or 1] * 5)])

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LONG)

    assert outcomes == [[1] * 5] * 4
