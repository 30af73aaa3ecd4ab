"""Many calls into the environment's code at the same time, each with a deadline.

The threads share no lock: one that hangs is ended by an exception that may strike it at any line, also between taking a
lock and noting it. They talk through `SimpleQueue`, and who says what came of a call is settled by `list.pop`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from types import FrameType
from typing import Any

from aitrain import activity
from aitrain.environment.contract import Job, current_job, finished
from aitrain.environment.failures import Failure, as_failure
from aitrain.environment.loader import users_line

Meanwhile = Callable[[int], float]
"""Called in the thread that waits for the calls: given how many calls are running (started, not finished), does what is
due (may block), returns seconds until it wants to look again (math.inf: when something changes)."""

GRACE = 5.0
"""Seconds that a call has to fail after what it waits for was ended; then its thread is given up."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call; `seconds` without the time that its clock stood still."""

    value: Any = None
    seconds: float = 0.0
    failure: Failure | None = None


class Workers:
    """Threads for calls into the environment's code, made on demand and reused."""

    def __init__(self, count: int, timeout: float) -> None:
        self._count, self._timeout = count, timeout
        self._threads: list[_Thread] = []
        self._numbers = itertools.count(1)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def run(self, jobs: Sequence[Callable[[], Any]], meanwhile: Meanwhile | None = None) -> list[Outcome]:
        """What came of each job, in their order; never raises for what a job does."""
        with self.taking() as calls:
            made = [calls.make(job) for job in jobs]
            while calls.running:
                calls.ended(meanwhile)
        return [call.outcome for call in made]

    @contextmanager
    def taking(self) -> Iterator[Calls]:
        """Calls that are made while others are under way; an error inside gives up those that still are."""
        with self._turn:
            calls = Calls(self)
            try:
                yield calls
            except BaseException:  # also of `meanwhile`, or Ctrl+C
                self._give_up()
                raise

    def take(self, job: Callable[[], Any]) -> Call:
        """Let a thread make the call as soon as one is free; for Calls."""
        call = Call(job, self._timeout, self._news)
        self._calls.put(call)
        return call

    def wake(self) -> None:
        """Something that `meanwhile` should look at has happened."""
        self._news.put(None)

    def close(self) -> None:
        """End the threads; one that is in a call ends after it."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(1.0)

    def watch(self, running: int, meanwhile: Meanwhile) -> set[Any]:
        """See to the threads and deadlines of so many calls, wait for news, and return what ended; for Calls."""
        self._hire(running)
        again = meanwhile(min(running, len(self._threads)))
        self._end_overdue()
        seconds = min([again, *(call.left() for _, call in self._running())])
        with activity.own.waiting(*self._awaited(running)):
            return set(self._hear(seconds))

    def _awaited(self, running: int) -> tuple[str, float]:
        """What the watchdog is told of a wait: its name, and its longest legal silence."""
        return ("waiting for the environment", self._timeout + GRACE) if running else ("generating", 0.0)

    def _hire(self, needed: int) -> None:
        while len(self._threads) < min(self._count, needed):
            thread = _Thread(f"environment-{next(self._numbers)}", self._calls, self._news)
            try:
                thread.start()
            except RuntimeError:  # the system has no more; fewer do as well
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _running(self) -> list[tuple[_Thread, Call]]:
        return [(thread, call) for thread in self._threads if (call := thread.call) is not None]

    def _hear(self, seconds: float) -> Iterator[Any]:
        """Wait for news, at most so long, and yield all there are."""
        try:
            yield self._news.get(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
            while True:
                yield self._news.get_nowait()
        except queue.Empty:
            pass

    def _end_overdue(self) -> None:
        for thread, call in self._running():
            if call.left() <= 0:
                self._end(thread, call)

    def _end(self, thread: _Thread, call: Call) -> None:
        waits = call.waits
        if waits is not None and call.late is None:
            end, awaited = waits
            call.late = call.timed_out(_stack_of(awaited))
            end(call.late)
        elif call.claim():
            if call.left() > 0 or (call.waits and not call.late):  # it was paused in between, or waits now
                call.unclaim()
                return
            failure = call.late or call.timed_out(_stack_of_thread(thread.ident))
            call.outcome = Outcome(None, call.ran(), failure)
            self._leave(thread, call, strike=True)
            self._news.put(call)

    def _leave(self, thread: _Thread, call: Call, strike: bool) -> None:
        self._threads.remove(thread)
        thread.leave(strike)
        call.is_over = True

    def _give_up(self) -> None:
        try:
            while True:
                self._calls.get_nowait()
        except queue.Empty:
            pass
        for thread, call in self._running():
            if waits := call.waits:
                waits[0](Failure("raised", "interrupted"))
            if call.claim():
                self._leave(thread, call, strike=call.left() < math.inf)


class Calls:
    """Calls under way, made one by one."""

    def __init__(self, workers: Workers) -> None:
        self.running: set[Call] = set()
        self._workers = workers

    def make(self, job: Callable[[], Any]) -> Call:
        """Make one more; it never raises for what the job does."""
        call = self._workers.take(job)
        self.running.add(call)
        return call

    def ended(self, meanwhile: Meanwhile | None = None) -> list[Call]:
        """Wait until some have ended, or `Workers.wake`, or `meanwhile` wants to look again; those that have."""
        heard = self._workers.watch(len(self.running), meanwhile or _nothing_meanwhile) & self.running
        self.running -= heard
        if heard:
            activity.tick()
        return list(heard)


def _nothing_meanwhile(running: int) -> float:
    return math.inf


def remaining() -> float | None:
    """Seconds that the calling job has left; None outside of a job."""
    job = current_job.get()
    return max(0.0, job.timeout - job.ran()) if isinstance(job, Call) else None


@contextmanager
def paused() -> Iterator[None]:
    """The clock of the calling job stands still: it waits for the model, not for the environment."""
    job = current_job.get()
    if not isinstance(job, Call):
        yield
        return
    job.pause(+1)
    try:
        yield
    finally:
        job.pause(-1)


class Call(Job):
    """One call of a job, and its clock."""

    def __init__(self, job: Callable[[], Any], timeout: float, news: queue.SimpleQueue[Call | None]) -> None:
        self.timeout = timeout
        self.outcome = Outcome()
        self.late: Failure | None = None  # what it fails with, once what it waited for was ended
        self.is_over = False
        self._job, self._news = job, news
        self._unclaimed = [True]
        self._started = math.inf
        self._pauses: list[tuple[float, int]] = []

    def carry_out(self) -> bool:
        """Make the call, in a thread; False: it was given up meanwhile."""
        self._started = time.perf_counter()
        self._news.put(None)  # there is a deadline to watch
        current_job.set(self)
        value, failure = None, None
        try:
            value = finished(self._job())
        except BaseException as error:
            failure = failure_of(error)
        outcome = (
            Outcome(None, self.ran(), self.late or failure) if self.late or failure else Outcome(value, self.ran())
        )
        if not self.claim():
            return False
        self.outcome, self.is_over = outcome, True
        return True

    def claim(self) -> bool:
        """Whether the caller, and nobody else, is the one to say what came of it."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def unclaim(self) -> None:
        """After a claim: leave it as it was."""
        self._unclaimed.append(True)

    def pause(self, step: int) -> None:
        """Stop its clock (+1), or let it go on when nobody else holds it (-1)."""
        self._pauses.append((time.perf_counter(), step))
        self.settle()
        self._news.put(None)

    def settle(self) -> None:
        """Wait while it is just being given up: the exception comes here, or not before what follows has ended."""
        while not self._unclaimed and not self.is_over:
            time.sleep(0.001)

    def ran(self) -> float:
        """Seconds on its clock."""
        return self._clock()[0]

    def left(self) -> float:
        """Seconds until something has to be done about it."""
        ran, is_paused = self._clock()
        return math.inf if is_paused else self.timeout + (GRACE if self.late else 0.0) - ran

    def _clock(self) -> tuple[float, bool]:
        ran, since, pauses = 0.0, self._started, 0
        for when, step in [*sorted(self._pauses), (max(since, time.perf_counter()), 0)]:
            ran += when - since if pauses == 0 and since < when else 0.0
            since, pauses = when, pauses + step
        return ran, pauses > 0

    def timed_out(self, stack: traceback.StackSummary) -> Failure:
        """It ran past its deadline, at these lines."""
        told = [f"timed out: no answer within {self.timeout:g} s", users_line(stack)]
        return Failure("timed_out", "\n".join(line for line in told if line), "".join(stack.format()))


class _Abandoned(BaseException):
    """Raised in a thread that was given up: not an Exception, which a loop that retries would catch."""


class _Thread(threading.Thread):
    """Carries out calls; a daemon, so that one that hangs does not keep the program from ending."""

    def __init__(self, name: str, calls: queue.SimpleQueue[Call | None], news: queue.SimpleQueue[Call | None]) -> None:
        super().__init__(name=name, daemon=True)
        self.call: Call | None = None
        self._calls, self._news = calls, news
        self._struck = threading.Lock()
        self._struck.acquire()

    def run(self) -> None:
        """Until it is told to end, or given up."""
        try:
            if not self._serve():
                self._struck.acquire()  # the exception comes here at the latest, not in Python's code that ends threads
        except _Abandoned:
            pass

    def _serve(self) -> bool:
        while (call := self._calls.get()) is not None:
            self.call = call
            if not copy_context().run(call.carry_out):
                return False
            self.call = None
            self._news.put(call)
            del call  # and what it returned, while there is nothing to do
        return True

    def leave(self, strike: bool) -> None:
        """Let it end by itself. `strike` raises in it, which ends a loop of Python's that hangs, but not a call into C
        that never returns. Its call was claimed before and it takes no other, so that no other call can be hit."""
        import ctypes

        try:
            if strike and self.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Abandoned))
        finally:
            self._struck.release()


def failure_of(error: BaseException) -> Failure:
    """As `as_failure`, whatever the error is."""
    try:
        return as_failure(error)
    except Exception:  # its own __str__ failed
        return Failure("raised", f"raised: {type(error).__name__}")


# -- saying where it hangs


def _stack_of(awaited: Any) -> traceback.StackSummary:
    """What `ended_by` was given: an awaitable, or a function that knows."""
    frames: list[tuple[FrameType, int]] = []
    if inspect.isawaitable(awaited):
        frames = _frames_of_awaitable(awaited)
    elif callable(awaited):
        return traceback.StackSummary.from_list(awaited())
    return traceback.StackSummary.extract(iter(frames))


def _stack_of_thread(ident: int | None) -> traceback.StackSummary:
    return traceback.StackSummary.extract(iter(_frames_of_thread(sys._current_frames().get(ident or 0))))


def _frames_of_thread(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(frame))[::-1] if frame else []


def _frames_of_awaitable(awaited: Any) -> list[tuple[FrameType, int]]:
    """Of a coroutine, those that it awaits; of one that blocks its thread, those of the thread."""
    frames: list[tuple[FrameType, int]] = []
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        awaited = awaited.cr_await
    for innermost in sys._current_frames().values() if frames else ():
        thread = _frames_of_thread(innermost)
        if any(frame is frames[-1][0] for frame, _ in thread):
            return thread
    return frames
