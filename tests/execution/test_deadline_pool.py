"""Many calls at the same time, each with a deadline: nothing that one of them does hangs or fails another."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import pytest

from aitrain.execution.async_calls import run_async, run_if_async, shared_loop
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import ProcessPool
from aitrain.execution.task import Outcome, paused, remaining
from tests.execution.waiting import eventually

LONG = 30.0
"""A deadline that nothing here should come near."""


FOREIGN: set[threading.Thread] = set()
"""Threads that were there before the test."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a test leaves behind would be in the way of the next; a call of another file's test may hang still."""
    FOREIGN.clear()
    FOREIGN.update(threading.enumerate())
    yield
    assert eventually(lambda: not threads())


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """What hangs ends when this is set, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def threads() -> list[str]:
    own = [thread for thread in threading.enumerate() if thread not in FOREIGN]
    return [thread.name for thread in own if re.fullmatch(r"environment-\d+", thread.name)]


def one(pool: DeadlinePool, job: Callable[[], Any]) -> Outcome:
    (outcome,) = pool.run([job])
    return outcome


def failure(outcome: Outcome) -> Failure:
    assert outcome.failure is not None
    assert outcome.value is None
    return outcome.failure


def spin(over: threading.Event) -> None:
    while not over.is_set():
        pass  # here it hangs


# -- together


def test_results_come_in_the_order_of_the_jobs(make_pool: Any) -> None:
    def answer(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        return number

    outcomes = make_pool(5).run([lambda number=number: answer(number) for number in range(5)])

    assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert all(outcome.failure is None for outcome in outcomes)
    assert outcomes[0].seconds >= 0.1


def test_nothing_to_do_is_done_at_once(make_pool: Any) -> None:
    assert make_pool().run([]) == []
    assert threads() == []


def test_jobs_run_at_the_same_time(make_pool: Any) -> None:
    barrier = threading.Barrier(8)

    outcomes = make_pool(8).run([lambda: barrier.wait(LONG)] * 8)

    assert sorted(outcome.value for outcome in outcomes) == list(range(8))


def test_threads_are_reused_and_not_more_than_asked_for(make_pool: Any) -> None:
    pool, seen = make_pool(3), set()

    def note() -> None:
        time.sleep(0.001)
        seen.add(threading.current_thread().name)

    for _ in range(5):
        pool.run([note] * 20)

    assert seen == {"environment-1", "environment-2", "environment-3"}
    assert sorted(threads()) == sorted(seen)


def test_only_as_many_threads_are_made_as_there_are_jobs(make_pool: Any) -> None:
    both = threading.Barrier(2)

    make_pool(100).run([lambda: both.wait(LONG)] * 2)

    assert len(threads()) == 2


def test_close_leaves_no_thread(make_pool: Any) -> None:
    pool, everybody = make_pool(8), threading.Barrier(8)
    pool.run([lambda: everybody.wait(LONG)] * 8)
    assert len(threads()) == 8

    pool.close()

    assert threads() == []


def test_a_closed_pool_can_be_used_again(make_pool: Any) -> None:
    pool = make_pool()
    pool.close()

    assert one(pool, lambda: 1).value == 1


def test_close_cancels_calls_that_have_not_started(make_pool: Any, over: threading.Event) -> None:
    pool, ended, started = make_pool(1), [], threading.Event()
    pool.submit(lambda: started.set() or over.wait(LONG), ended.append)
    waiting = pool.submit(lambda: 1, ended.append)
    assert started.wait(LONG)

    threading.Timer(0.05, over.set).start()
    pool.close()

    assert ended[0] is waiting
    assert failure(waiting.outcome).message.startswith("cancelled: ")
    assert eventually(lambda: len(ended) == 2)


def test_what_a_job_sets_for_its_context_does_not_reach_the_next(make_pool: Any) -> None:
    from contextvars import ContextVar

    word: ContextVar[str] = ContextVar("word", default="nothing")
    pool = make_pool(1)

    one(pool, lambda: word.set("mine"))

    assert one(pool, word.get).value == "nothing"


def test_fewer_threads_do_as_well_when_the_system_has_no_more(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, itertools.count(1)

    def grudgingly(self: threading.Thread) -> None:
        if re.fullmatch(r"environment-\d+", self.name) and next(left) > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", grudgingly)
    names: set[str] = set()

    outcomes = make_pool(8).run([lambda: names.add(threading.current_thread().name)] * 8)

    assert [outcome.failure for outcome in outcomes] == [None] * 8
    assert 1 <= len(names) <= 2


def test_calls_that_no_thread_is_left_for_fail(
    make_pool: Any, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, itertools.count(1)

    def once(self: threading.Thread) -> None:
        if re.fullmatch(r"environment-\d+", self.name) and next(left) > 1:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", once)
    pool = make_pool(2, timeout=0.2)

    hung, other = pool.run([over.wait, lambda: 1])

    assert failure(hung).kind == "timed_out"
    assert failure(other).message.startswith("no thread can be started")
    with pytest.raises(RuntimeError, match="new thread"):
        pool.run([lambda: 1])


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
def test_whatever_a_job_raises_is_its_failure(make_pool: Any, error: BaseException) -> None:
    def fail() -> None:
        raise error

    pool = make_pool(2)
    failed, other = pool.run([fail, lambda: 1])

    assert failure(failed).kind == "raised"
    assert failure(failed).message.startswith(f"raised: {type(error).__name__}")
    assert other.value == 1
    assert one(pool, lambda: 2).value == 2


def test_a_failure_names_the_users_line(make_pool: Any) -> None:
    def fail() -> None:
        raise ValueError("no such city")  # the line

    told = failure(one(make_pool(), fail))

    assert "raised: ValueError: no such city\nat " in told.message
    assert told.message.endswith('in fail: raise ValueError("no such city")  # the line')
    assert "Traceback" in told.trace


def test_a_failure_that_is_known_already_is_kept(make_pool: Any) -> None:
    known = Failure("crashed", "crashed: by itself")

    def fail() -> None:
        raise CallFailed(known)

    assert one(make_pool(), fail).failure is known


def test_a_timeout_of_the_users_own_is_no_deadline_of_ours(make_pool: Any) -> None:
    async def give_up() -> None:
        await asyncio.wait_for(asyncio.sleep(LONG), 0.01)

    assert failure(one(make_pool(), give_up)).kind == "raised"


# -- deadlines


def test_a_job_that_hangs_times_out_with_the_users_line(make_pool: Any, over: threading.Event) -> None:
    told = failure(one(make_pool(timeout=0.2), lambda: spin(over)))

    assert told.kind == "timed_out"
    first, second = told.message.split("\n")
    assert first == "timed out: no answer within 0.2 s"
    assert re.fullmatch(
        r"at .*test_deadline_pool\.py, line \d+, in spin: (while not over\.is_set\(\):|pass  # here it hangs)", second
    )
    assert "in spin" in told.trace


def test_the_line_is_the_users_also_where_python_waits(make_pool: Any) -> None:
    released = threading.Event()

    def hang() -> None:
        released.wait()

    told = failure(one(make_pool(timeout=0.2), hang))
    released.set()

    assert told.message.endswith("in hang: released.wait()")
    assert "threading.py" in told.trace


def test_a_job_that_hangs_holds_up_nothing_else(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(2, timeout=0.3)

    hung, *others = pool.run([lambda: spin(over), *[lambda: 1] * 6])

    assert failure(hung).kind == "timed_out"
    assert hung.seconds >= 0.3
    assert [other.value for other in others] == [1] * 6
    assert [outcome.value for outcome in pool.run([lambda: 2] * 6)] == [2] * 6


def test_the_threads_of_jobs_that_hang_are_replaced(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(2, timeout=0.2)

    outcomes = pool.run([lambda: spin(over), lambda: spin(over), *[lambda: 1] * 4])

    assert [outcome.value for outcome in outcomes] == [None, None, 1, 1, 1, 1]


def test_a_hung_thread_is_counted_until_it_ends(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(4, timeout=0.2)
    assert (pool.abandoned, pool.last_hang) == (0, "")

    pool.run([lambda: over.wait()] * 3)

    assert pool.abandoned == 3
    assert pool.last_hang.endswith("pool.run([lambda: over.wait()] * 3)")
    over.set()
    assert eventually(lambda: pool.abandoned == 0)
    assert eventually(lambda: not threads())


def test_nothing_is_raised_in_a_hung_thread_and_what_it_returns_late_is_dropped(
    make_pool: Any, over: threading.Event
) -> None:
    pool, late = make_pool(1, timeout=0.2), []

    def hang() -> str:
        try:
            over.wait()
        finally:
            late.append(sys.exc_info())
        return "late"

    hung = one(pool, hang)
    (hanging,) = threads()
    names = {outcome.value for outcome in pool.run([lambda: threading.current_thread().name] * 3)}
    over.set()

    assert hanging not in names
    assert eventually(lambda: hanging not in threads())
    assert failure(hung).kind == "timed_out"
    assert late == [(None, None, None)]


def test_a_lock_that_a_hung_thread_holds_fails_those_who_wait_for_it_and_nobody_else(
    make_pool: Any, over: threading.Event
) -> None:
    pool, lock = make_pool(4, timeout=0.15), threading.Lock()

    def hold() -> None:
        with lock:
            over.wait()

    def want() -> None:
        with lock:  # which never comes
            pass

    first = one(pool, hold)
    second, *others = pool.run([want, *[lambda: 1] * 8])

    assert failure(first).message.endswith("in hold: over.wait()")
    assert failure(second).message.endswith("in want: with lock:  # which never comes")
    assert [other.value for other in others] == [1] * 8
    assert pool.abandoned == 2
    over.set()
    assert eventually(lambda: pool.abandoned == 0), "the second gets the lock when the first ends"


def test_of_200_calls_at_once_one_hangs(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(200, timeout=0.5)
    jobs = [lambda number=number: over.wait() if number == 77 else number for number in range(200)]

    outcomes = pool.run(jobs)

    assert failure(outcomes[77]).kind == "timed_out"
    assert [outcome.value for outcome in outcomes] == [None if number == 77 else number for number in range(200)]
    assert pool.abandoned == 1


def test_200_calls_that_hang_at_once_are_all_abandoned(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(200, timeout=0.3)

    outcomes = pool.run([over.wait] * 200)

    assert {failure(outcome).kind for outcome in outcomes} == {"timed_out"}
    assert pool.abandoned == 200
    assert one(pool, lambda: 1).value == 1


def test_a_deadline_is_kept_while_the_caller_is_busy(make_pool: Any, over: threading.Event) -> None:
    pool, ended = make_pool(2, timeout=0.3), threading.Event()
    start, seconds = time.perf_counter(), []
    task = pool.submit(over.wait, lambda _: seconds.append(time.perf_counter() - start) or ended.set())

    while not ended.is_set() and time.perf_counter() < start + LONG:
        pow(3, 10**4)  # holds the GIL as a training step does

    assert 0.3 <= task.outcome.seconds <= seconds[0] < LONG
    assert failure(task.outcome).kind == "timed_out"


def test_two_pools_work_at_once(make_pool: Any, over: threading.Event) -> None:
    slow, fast = make_pool(2, timeout=LONG), make_pool(2, timeout=0.2)
    released = threading.Event()
    ended: list[Any] = []
    slow.submit(lambda: released.wait(LONG), ended.append)

    hung = one(fast, over.wait)
    released.set()

    assert failure(hung).kind == "timed_out"
    assert eventually(lambda: ended)
    assert ended[0].outcome.value is True
    assert (slow.abandoned, fast.abandoned) == (0, 1)


def test_a_pool_may_be_used_inside_a_job_of_another(make_pool: Any) -> None:
    outer, inner = make_pool(2), make_pool(2)

    outcomes = outer.run([lambda: one(inner, lambda: remaining()).value] * 4)

    assert all(0 < outcome.value <= LONG for outcome in outcomes)


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_end_just_at_their_deadline_disturb_nothing(make_pool: Any, seed: int) -> None:
    """Whoever wins, there is one outcome, and every thread that was abandoned ends."""
    pool = make_pool(8, timeout=0.02)

    def close_to_it(number: int) -> int:
        until = time.perf_counter() + 0.018 + 0.0001 * ((number * 7 + seed) % 40)
        while time.perf_counter() < until:
            with paused():
                pass
        return number

    outcomes = pool.run([lambda number=number: close_to_it(number) for number in range(60)])

    for number, outcome in enumerate(outcomes):
        assert outcome.value == number or failure(outcome).kind == "timed_out"
    assert eventually(lambda: pool.abandoned == 0)
    pool.timeout = LONG
    assert [outcome.value for outcome in pool.run([lambda: 1] * 50)] == [1] * 50


def test_a_process_with_a_hung_thread_ends_when_its_work_is_done() -> None:
    code = (
        "import asyncio, threading\n"
        "from aitrain.execution.deadline_pool import DeadlinePool\n"
        "pool = DeadlinePool(2, 0.1)\n"
        "print(asyncio.run(pool.call(threading.Event().wait)).failure.kind, pool.abandoned)\n"
        "pool.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("timed_out 1\n", "")


def test_processes_are_forked_and_leased_as_ever_while_a_thread_hangs(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(1, timeout=0.2)
    one(pool, over.wait)
    assert pool.abandoned == 1

    processes = ProcessPool.start("an environment")
    outcome = one(pool, lambda: processes.lease(str).call("upper"))
    processes.close()

    assert outcome.value == "AN ENVIRONMENT"


def test_what_a_call_returned_is_not_kept_by_an_idle_thread(make_pool: Any) -> None:
    class Big:
        pass

    pool = make_pool(1)
    outcome = one(pool, Big)
    value = weakref.ref(outcome.value)

    del outcome

    assert eventually(lambda: gc.collect() >= 0 and value() is None)


def test_a_queued_job_is_not_charged_for_waiting(make_pool: Any) -> None:
    def slow() -> int:
        time.sleep(0.25)
        return 1

    outcomes = make_pool(1, timeout=0.6).run([slow] * 4)

    assert [outcome.value for outcome in outcomes] == [1] * 4


def test_there_may_be_no_deadline(make_pool: Any) -> None:
    assert one(make_pool(timeout=math.inf), lambda: remaining()).value == math.inf


# -- the clock


def test_remaining_is_the_time_that_the_job_has_left(make_pool: Any) -> None:
    def look() -> tuple[float | None, float | None]:
        before = remaining()
        time.sleep(0.1)
        return before, remaining()

    before, after = one(make_pool(timeout=LONG), look).value

    assert 0 < after <= before - 0.1 < before <= LONG
    assert remaining() is None


def test_paused_time_is_not_charged(make_pool: Any) -> None:
    def patient() -> float | None:
        with paused():
            time.sleep(0.4)
            with paused():
                time.sleep(0.4)
            time.sleep(0.4)
            return remaining()

    outcome = one(make_pool(timeout=0.5), patient)

    assert outcome.failure is None
    assert outcome.value > 0
    assert outcome.seconds < 0.5


def test_the_clock_goes_on_after_a_pause(make_pool: Any, over: threading.Event) -> None:
    def patient() -> None:
        with paused():
            time.sleep(0.1)
        spin(over)

    outcome = one(make_pool(timeout=0.2), patient)

    assert failure(outcome).kind == "timed_out"
    assert outcome.seconds >= 0.2


def test_pausing_outside_of_a_job_does_nothing() -> None:
    with paused(), paused():
        assert remaining() is None


def test_what_an_async_job_waits_for_can_be_paused_too(make_pool: Any) -> None:
    async def ask() -> None:
        with paused():
            await asyncio.sleep(0.6)

    async def patient() -> float | None:
        await asyncio.gather(ask(), ask())
        return remaining()

    outcome = one(make_pool(timeout=0.4), patient)

    assert outcome.failure is None
    assert outcome.value > 0
    assert outcome.seconds < 0.4


# -- async jobs


def test_async_jobs_run_together_on_one_loop(make_pool: Any) -> None:
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

    outcomes = make_pool(16).run([lambda number=number: meet(number) for number in range(16)])

    assert {outcome.value for outcome in outcomes} == {shared_loop()}


def test_the_first_async_jobs_agree_on_the_loop(make_pool: Any) -> None:
    async def which() -> Any:
        return asyncio.get_running_loop()

    for _ in range(10):
        shared_loop.cache_clear()
        barrier = threading.Barrier(8)

        def ask(barrier: threading.Barrier = barrier) -> Any:
            barrier.wait(LONG)
            return which()

        assert len({outcome.value for outcome in make_pool(8).run([ask] * 8)}) == 1


def test_an_async_job_that_hangs_is_cancelled_and_its_thread_goes_on(make_pool: Any) -> None:
    pool, cancelled = make_pool(2, timeout=0.3), threading.Event()

    async def inner() -> None:
        try:
            await asyncio.sleep(1000)  # forever
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def outer() -> None:
        await inner()

    both = threading.Barrier(2)
    pool.run([lambda: both.wait(LONG)] * 2)
    before = threads()
    hung, other = pool.run([outer, lambda: 1])

    assert failure(hung).kind == "timed_out"
    assert failure(hung).message.startswith("timed out: no answer within 0.3 s\nat ")
    assert failure(hung).message.endswith("in inner: await asyncio.sleep(1000)  # forever")
    assert "in outer" in failure(hung).trace
    assert cancelled.wait(LONG)
    assert other.value == 1
    assert threads() == before


def test_an_async_method_called_inside_a_job_has_its_deadline_too(make_pool: Any) -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> Any:
        return [run_if_async(asyncio.sleep(0, 1)), run_if_async(hang())]

    pool = make_pool(1, timeout=0.3)
    told = failure(one(pool, job))

    assert told.kind == "timed_out"
    assert told.message.endswith("in hang: await asyncio.sleep(1000)")
    assert len(threads()) == 1


def test_an_async_job_that_swallows_its_end_has_timed_out_all_the_same(make_pool: Any) -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> str:
        with suppress(Exception):
            run_if_async(hang())
        return "never mind"

    assert failure(one(make_pool(1, timeout=0.2), job)).kind == "timed_out"


def test_a_job_that_goes_on_after_its_wait_was_cancelled_is_abandoned(
    make_pool: Any, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.execution.deadline_thread.GRACE", 0.2)

    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> None:
        try:
            run_if_async(hang())
        except Exception:
            spin(over)

    pool = make_pool(1, timeout=0.2)
    told = failure(one(pool, job))

    assert told.message.endswith("in hang: await asyncio.sleep(1000)")
    assert pool.abandoned == 1
    assert "in spin: " in pool.last_hang


def test_what_an_abandoned_job_waits_for_then_is_cancelled_too(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.execution.deadline_thread.GRACE", 0.2)

    async def hang() -> None:
        await asyncio.sleep(1000)

    def job() -> None:
        with suppress(Exception):
            run_if_async(hang())
        run_if_async(hang())

    pool = make_pool(1, timeout=0.2)
    assert failure(one(pool, job)).kind == "timed_out"
    assert eventually(lambda: pool.abandoned == 0)


def test_an_abandoned_job_can_wait_for_nothing_more(make_pool: Any, over: threading.Event) -> None:
    pool, refused = make_pool(1, timeout=0.2), []

    def job() -> None:
        over.wait()
        try:
            run_if_async(asyncio.sleep(1000))
        except CallFailed as error:
            refused.append(error.failure)

    hung = one(pool, job)
    over.set()

    assert eventually(lambda: refused == [hung.failure])


def test_a_blocked_loop_is_replaced(make_pool: Any) -> None:
    released, stuck = threading.Event(), shared_loop()

    async def block() -> None:
        released.wait()

    async def fine() -> int:
        await asyncio.sleep(0)
        return 1

    pool = make_pool(2, timeout=0.5)
    blocked = failure(one(pool, block))
    later = [outcome.value for outcome in pool.run([fine] * 4)]
    released.set()

    assert blocked.kind == "timed_out"
    assert blocked.message.endswith("in block: released.wait()")
    assert later == [1] * 4
    assert shared_loop() is not stuck


def test_a_loop_that_only_waits_is_kept(make_pool: Any) -> None:
    before = shared_loop()

    make_pool(2, timeout=0.2).run([lambda: asyncio.sleep(1000)] * 2)

    assert shared_loop() is before


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


# -- interruptions


@pytest.mark.slow
def test_ctrl_c_reaches_the_thread_that_waits(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(2)

    def interrupt() -> None:
        time.sleep(0.2)  # until it waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        spin(over)

    with pytest.raises(KeyboardInterrupt):
        pool.run([interrupt, lambda: over.wait(LONG)])

    assert [outcome.value for outcome in pool.run([lambda: 1] * 4)] == [1] * 4


def test_an_interrupted_run_cancels_what_is_awaited(make_pool: Any) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    async def interrupted() -> None:
        call = asyncio.ensure_future(make_pool().call(hang))
        while not started.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call

    asyncio.run(interrupted())
    assert cancelled.wait(LONG)


def test_threads_may_run_jobs_at_the_same_time(make_pool: Any) -> None:
    pool, outcomes = make_pool(2), []

    def run() -> None:
        outcomes.append([outcome.value for outcome in pool.run([lambda: time.sleep(0.01) or 1] * 5)])

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LONG)

    assert outcomes == [[1] * 5] * 4


# -- awaited


def test_calls_are_awaited_together_on_an_event_loop(make_pool: Any) -> None:
    pool, everybody = make_pool(16), threading.Barrier(16)

    async def main() -> list[Outcome[int]]:
        return await asyncio.gather(*[pool.call(lambda: everybody.wait(LONG)) for _ in range(16)])

    assert sorted(outcome.value for outcome in asyncio.run(main())) == list(range(16))


def test_more_calls_than_threads_are_awaited_in_their_order(make_pool: Any) -> None:
    pool = make_pool(4)

    async def main() -> list[Outcome[int]]:
        return await asyncio.gather(*[pool.call(lambda number=number: number) for number in range(512)])

    assert [outcome.value for outcome in asyncio.run(main())] == list(range(512))
    assert asyncio.run(main())[-1].value == 511, "on another loop, too"


def test_calls_of_one_iteration_of_the_loop_are_enqueued_together(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, together = make_pool(4), list[int]()
    enqueue = pool._enqueue
    monkeypatch.setattr(pool, "_enqueue", lambda tasks: together.append(len(tasks)) or enqueue(tasks))

    async def main() -> None:
        await asyncio.gather(*[pool.call(lambda: 1) for _ in range(64)])
        await pool.call(lambda: 1)

    asyncio.run(main())
    assert together == [64, 1]


def test_a_call_that_is_cancelled_before_it_is_enqueued_never_runs(make_pool: Any) -> None:
    pool, ran = make_pool(4), list[int]()

    async def main() -> None:
        call = asyncio.ensure_future(pool.call(lambda: ran.append(1)))
        asyncio.get_running_loop().call_soon(call.cancel)  # after its first step, in the same iteration
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()
        assert (await pool.call(lambda: 2)).value == 2

    asyncio.run(main())
    assert ran == []
    assert pool.abandoned == 0


def test_an_awaited_call_that_hangs_fails_while_the_loop_goes_on(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(2, timeout=0.2)

    async def main() -> Outcome[bool]:
        call = asyncio.ensure_future(pool.call(over.wait))
        while not call.done():
            await asyncio.sleep(0.01)
        return call.result()

    assert failure(asyncio.run(main())).kind == "timed_out"
    assert pool.abandoned == 1


def test_an_async_job_is_awaited_with_its_deadline(make_pool: Any) -> None:
    pool, cancelled = make_pool(2, timeout=1.0), threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    async def main() -> Any:
        return await asyncio.gather(pool.call(hang), pool.call(lambda: asyncio.sleep(0, 7)))

    hung, fine = asyncio.run(main())

    assert failure(hung).kind == "timed_out"
    assert cancelled.is_set()
    assert fine.value == 7
    assert pool.abandoned == 0


def test_a_call_whose_awaiting_task_is_cancelled_is_abandoned(make_pool: Any, over: threading.Event) -> None:
    pool, started, ran_later = make_pool(1), threading.Event(), []

    async def main() -> None:
        running = asyncio.ensure_future(pool.call(lambda: started.set() or over.wait(LONG)))
        waiting = asyncio.ensure_future(pool.call(lambda: ran_later.append(1)))
        while not started.is_set():
            await asyncio.sleep(0.01)
        for call in (waiting, running):
            call.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert pool.abandoned == 1
        assert (await pool.call(lambda: 2)).value == 2

    asyncio.run(main())
    assert ran_later == []
    over.set()
    assert eventually(lambda: pool.abandoned == 0)


def test_calls_that_end_after_their_loop_was_closed_harm_nobody(make_pool: Any, over: threading.Event) -> None:
    pool = make_pool(2)

    async def main() -> None:
        call = asyncio.ensure_future(pool.call(lambda: over.wait(LONG)))
        await asyncio.sleep(0.01)
        assert not call.done()

    asyncio.run(main())
    over.set()

    assert one(pool, lambda: 1).value == 1


@pytest.mark.parametrize("seed", range(2))
def test_calls_that_are_cancelled_just_when_they_end_disturb_nothing(make_pool: Any, seed: int) -> None:
    pool = make_pool(8, timeout=0.02)

    async def some(number: int) -> int | None:
        call = pool.call(lambda: time.sleep(0.0001 * ((number * 7 + seed) % 40)) or number)
        with suppress(TimeoutError):
            return (await asyncio.wait_for(call, 0.002)).value
        return None

    async def main() -> list[int | None]:
        return await asyncio.gather(*[some(number) for number in range(200)])

    assert all(value in (None, number) for number, value in enumerate(asyncio.run(main())))
    assert eventually(lambda: pool.abandoned == 0)
    pool.timeout = LONG
    assert [outcome.value for outcome in pool.run([lambda: 1] * 50)] == [1] * 50


def test_on_done_is_called_once_with_the_outcome_set(make_pool: Any, over: threading.Event) -> None:
    pool, seen = make_pool(4, timeout=0.2), []
    jobs = [lambda: 1, over.wait, lambda: 1 / 0, lambda: asyncio.sleep(1000)]

    tasks = [pool.submit(job, lambda task: seen.append((task, task.outcome))) for job in jobs]

    assert eventually(lambda: len(seen) == 4)
    over.set()
    assert eventually(lambda: pool.abandoned == 0)
    assert {task for task, _ in seen} == set(tasks)
    assert len(seen) == 4
    kinds = [outcome.failure and outcome.failure.kind for outcome in (dict(seen)[task] for task in tasks)]
    assert kinds == [None, "timed_out", "raised", "timed_out"]
