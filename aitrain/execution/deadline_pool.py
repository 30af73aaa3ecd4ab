"""Threads for calls into the user's code, each call with a deadline.

Nothing is raised in a thread from outside. One that hangs is abandoned: its call fails with its stack, and the thread
leaves the pool, is counted, and ends by itself after its call, if that ever ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from traceback import StackSummary
from types import TracebackType
from typing import Generic, TypeVar

from aitrain import activity
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import Failure, as_failure
from aitrain.execution.stacks import stack_of_thread
from aitrain.execution.task import Outcome, Task, Wait, current_task
from aitrain.execution.user_code import users_line

T = TypeVar("T")

GRACE = 5.0
"""Seconds that a call has to fail after what it waits for was cancelled; then its thread is abandoned."""
RETRY = 1.0
"""Seconds until threads are asked for again, where the system has none for the last calls."""
CANCELLED = Failure("raised", "cancelled: nobody waits for this call any more")


class DeadlinePool:
    """At most `threads` threads, made on demand and reused; each call has `timeout` seconds from its start."""

    def __init__(self, threads: int, timeout: float) -> None:
        self.threads, self.timeout = threads, timeout
        self.abandoned = 0
        """Threads of abandoned calls that are still running."""
        self.last_hang = ""
        """The user's line that the last call to hang is at."""
        self._inbox: _LoopInbox | None = None
        self.scope_wakes: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        self._queue: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of all that follows, and of the tasks' clocks
        self._threads: set[threading.Thread] = set()
        self._running: dict[Task[object], threading.Thread] = {}
        self._unfinished = 0
        self._deadline_thread: threading.Thread | None = None
        self._earlier_deadline = threading.Condition(self._lock)
        self._wakes_at = math.inf

    def submit(self, job: Callable[[], T], on_done: Callable[[Task[T]], None]) -> Task[T]:
        """Call `job` in a thread as soon as one is free; `on_done` is called once, in that thread or in the deadline
        thread, when the call has ended or was abandoned."""
        task = Task(job, on_done, self.timeout, self._lock, self._set_deadline)
        with self._lock:
            self._unfinished += 1
            try:
                self._start_threads()
            except BaseException:
                self._unfinished -= 1
                raise
            self._queue.put(task)
        return task

    async def call(self, job: Callable[[], T]) -> Outcome[T]:
        """The outcome of `job`, awaited on the running event loop; a call whose awaiting task is cancelled is
        abandoned."""
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = _LoopInbox(loop)
        future: asyncio.Future[Outcome[T]] = loop.create_future()
        task = self.submit(job, partial(self._inbox.deliver, future))
        try:
            return await future
        except BaseException:
            self.cancel(task)
            raise

    def cancel(self, task: Task[object]) -> None:
        """Abandon a call, unless it has ended."""
        with self._lock:
            if task.is_done:
                return
            wait = task.wait
            self._abandon(task, CANCELLED)
        if wait is not None:
            wait.cancel(CANCELLED)
        task.on_done(task)

    def close(self) -> None:
        """End the threads; calls that have not started are cancelled, a thread in a call ends after it."""
        with self._lock:
            threads, self._threads = self._threads, set()
            tasks, self._queue = self._queue, queue.SimpleQueue()
        with suppress(queue.Empty):
            while (task := tasks.get_nowait()) is not None:
                self.cancel(task)
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join(1.0)
        with self._lock:
            deadline_thread = self._deadline_thread
            self._set_deadline(-math.inf)
        if deadline_thread is not None:
            deadline_thread.join(1.0)

    # -- threads

    def _start_threads(self) -> None:
        """Start the threads that the unfinished calls need.

        Raises:
            RuntimeError: the system has no thread at all for them.
        """
        if self._deadline_thread is None and self.timeout < math.inf:
            thread = threading.Thread(target=self._watch_deadlines, name="environment-deadlines", daemon=True)
            thread.start()
            self._deadline_thread = thread
        if len(self._threads) < min(self.threads, self._unfinished):
            name = f"environment-{next(self._numbers)}"
            thread = threading.Thread(target=self._work, args=(self._queue,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more; fewer do as well
                if not self._threads:
                    raise
                return
            self._threads.add(thread)

    def _work(self, tasks: queue.SimpleQueue[Task[object] | None]) -> None:
        while (task := tasks.get()) is not None:
            if self._start(task):
                outcome = copy_context().run(_execute, task)
                if not self._finish(task, outcome):
                    return
                task.on_done(task)
                del outcome
            del task  # and what it returned, while there is nothing to do

    def _start(self, task: Task[object]) -> bool:
        with self._lock:
            if not task.is_done:
                self._running[task] = threading.current_thread()
                task.start()
            return not task.is_done

    def _finish(self, task: Task[object], outcome: Outcome[object]) -> bool:
        """Set the outcome, unless the call was abandoned."""
        with self._lock:
            if task.is_abandoned:
                self.abandoned -= 1
                return False
            del self._running[task]
            self._unfinished -= 1
            task.finish(outcome)
            activity.own.tick()
            return True

    def _abandon(self, task: Task[object], failure: Failure) -> None:
        task.finish(Outcome(None, task.ran(), failure), is_abandoned=True)
        self._unfinished -= 1
        activity.own.tick()
        thread = self._running.pop(task, None)
        if thread is not None:
            self._threads.discard(thread)
            self.abandoned += 1
            with suppress(RuntimeError):  # the deadline thread tries again
                self._start_threads()

    # -- deadlines

    def _set_deadline(self, due: float) -> None:
        """Wake the deadline thread if this is before what it waits for."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._earlier_deadline.notify()

    def _watch_deadlines(self) -> None:
        """All calls have the same timeout, so that few wake-ups look at all of the running ones."""
        while True:
            with self._lock:
                if not self._unfinished:
                    self._deadline_thread, self._wakes_at = None, math.inf
                    return
                now = time.perf_counter()
                overdue = [task for task in self._running if task.due <= now]
                if not overdue:
                    self._wakes_at = min([*(task.due for task in self._running), self._next_try(now)])
                    self._earlier_deadline.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for task in overdue:
                self._expire(task)

    def _next_try(self, now: float) -> float:
        if self._threads:
            return math.inf
        with suppress(RuntimeError):
            self._start_threads()
        return now + RETRY

    def _expire(self, task: Task[object]) -> None:
        """Cancel what an overdue call waits for; abandon a call that waits for nothing, or did not fail in time."""
        wait, thread = task.wait, self._running.get(task)
        if wait is not None and task.late is None:
            self._cancel_wait(task, wait)
        elif thread is not None:
            self._abandon_hanging(task, stack_of_thread(thread))

    def _cancel_wait(self, task: Task[object], wait: Wait) -> None:
        failure = task.timed_out(wait.stack())
        with self._lock:
            if not task.is_overdue:  # it has ended or was paused meanwhile
                return
            task.give_grace(failure, GRACE)
        wait.cancel(failure)

    def _abandon_hanging(self, task: Task[object], stack: StackSummary) -> None:
        failure = task.late or task.timed_out(stack)
        with self._lock:
            wait = task.wait
            if not task.is_overdue or (wait is not None and task.late is None):
                return
            self.last_hang = users_line(stack)
            self._abandon(task, failure)
        if wait is not None:
            wait.cancel(failure)
        task.on_done(task)

    # -- for callers that are not async

    def run(self, jobs: Sequence[Callable[[], T]], poll: Poll | None = None) -> list[Outcome[T]]:
        """The outcome of each job, in their order; never raises for what a job does."""
        with TaskScope[T](self) as scope:
            tasks = [scope.submit(job) for job in jobs]
            while scope.running:
                scope.wait(poll)
        return [task.outcome for task in tasks]

    def wake(self) -> None:
        """Make the threads that wait in a TaskScope look again."""
        for wake in list(self.scope_wakes):
            wake()

    @property
    def size(self) -> int:
        """How many threads there are."""
        return len(self._threads)


Poll = Callable[[int], float]
"""Called in the thread that waits for tasks: given how many are in a thread, does what is due (may block) and returns
the seconds until it wants to be called again (math.inf: when something changes)."""


class TaskScope(Generic[T]):
    """Tasks of one thread that waits for them; leaving it with an error abandons those that still run."""

    def __init__(self, pool: DeadlinePool) -> None:
        self.running: set[Task[T]] = set()
        self._pool = pool
        self._ended: queue.SimpleQueue[Task[T] | None] = queue.SimpleQueue()

    def __enter__(self) -> TaskScope[T]:
        self._pool.scope_wakes.append(self.wake)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.scope_wakes.remove(self.wake)
        if error is not None:
            for task in self.running:
                self._pool.cancel(task)

    def submit(self, job: Callable[[], T]) -> Task[T]:
        """See DeadlinePool."""
        task = self._pool.submit(job, self._ended.put)
        self.running.add(task)
        return task

    def wait(self, poll: Poll | None = None) -> list[Task[T]]:
        """Wait until tasks have ended, or `wake`, or `poll` wants to be called again; those that have ended."""
        seconds = math.inf if poll is None else poll(min(len(self.running), self._pool.size))
        patience = ("waiting for the environment", self._pool.timeout + GRACE) if self.running else ("generating", 0.0)
        with activity.own.waiting(*patience):
            ended = [task for task in self._news(seconds) if task in self.running]
        self.running.difference_update(ended)
        return ended

    def wake(self) -> None:
        """End a wait."""
        self._ended.put(None)

    def _news(self, seconds: float) -> Iterator[Task[T]]:
        timeout = min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        with suppress(queue.Empty):
            news = self._ended.get(timeout=timeout)
            while True:
                if news is not None:
                    yield news
                news = self._ended.get_nowait()


class _LoopInbox:
    """Outcomes on their way to an event loop; those that arrive together wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def deliver(self, future: asyncio.Future[Outcome[T]], task: Task[T]) -> None:
        """Resolve the future with the task's outcome; called in any thread."""
        self._arrived.append(partial(_resolve, future, task.outcome))
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self.loop.call_soon_threadsafe(self._resolve_all)

    def _resolve_all(self) -> None:
        self._is_waking = False
        while self._arrived:
            self._arrived.popleft()()


def _resolve(future: asyncio.Future[Outcome[T]], outcome: Outcome[T]) -> None:
    if not future.done():
        future.set_result(outcome)


def _execute(task: Task[T]) -> Outcome[T]:
    current_task.set(task)
    try:
        value = run_if_async(task.job())
    except BaseException as error:
        return Outcome(None, task.ran(), task.late or as_failure(error))
    return Outcome(None if task.late else value, task.ran(), task.late)
