"""Threads for calls into the user's code, each call with a deadline.

Python cannot end a thread. A thread whose call hangs is abandoned: the call fails with its stack, and the thread is
counted, and ends when its call ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from aitrain import activity
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import Failure, as_failure
from aitrain.execution.task import Outcome, Task, current_task
from aitrain.execution.user_code import stack_of_thread, users_line

T = TypeVar("T")

GRACE = 5.0
"""Seconds that a call has to fail after its wait was cancelled; then its thread is abandoned."""
CANCELLED = Failure("raised", "cancelled: the result is no longer needed")
NO_THREAD = Failure("raised", "no thread can be started: the system's limit is reached, and all threads of calls hang")


class DeadlinePool:
    """Runs calls in at most `threads` threads; each call has `timeout` seconds from its start. A thread ends when no
    call waits for it."""

    def __init__(self, threads: int, timeout: float) -> None:
        self.max_threads, self.timeout = threads, timeout
        self.abandoned = 0
        """Threads of abandoned calls that are still running."""
        self.last_hang = ""
        """The line of the user's code at which the last abandoned call hangs."""
        self._numbers = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())  # protects the attributes below and the tasks' clocks
        self._waiting: deque[Task[Any]] = deque()
        self._running: dict[Task[Any], threading.Thread] = {}
        self._threads = 0  # without those that were abandoned
        self._watcher: threading.Thread | None = None
        self._wakes_at = math.inf

    def submit(self, job: Callable[[], T], on_done: Callable[[Task[T]], None]) -> Task[T]:
        """Call `job` in a thread as soon as one is free; an awaitable that it returns is awaited on the shared loop.
        `on_done`, which must not block, is called once, in any thread, when the call has ended or was abandoned."""
        task = self._enqueued(job, on_done, self.timeout)
        self._start_threads()
        return task

    def _enqueued(self, job: Callable[[], T], on_done: Callable[[Task[T]], None], timeout: float) -> Task[T]:
        task = Task(job, on_done, timeout, self._changed, self._set_deadline)
        with self._changed:
            self._waiting.append(task)
        return task

    async def call(self, job: Callable[[], T], timeout: float | None = None) -> Outcome[T]:
        """The outcome of `job`, awaited on the running event loop; a call whose awaiting task is cancelled is
        abandoned. `timeout` takes the place of the pool's."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome[T]] = loop.create_future()

        def deliver(task: Task[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(task.outcome))

        task = self._enqueued(job, deliver, self.timeout if timeout is None else timeout)
        loop.call_soon(self._start_threads)  # after all calls of this iteration, which a few threads may make
        try:
            return await future
        except BaseException:
            self.cancel(task)
            raise

    def call_all(self, jobs: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
        """The outcomes of calls, for which the calling thread waits."""
        ended = threading.Semaphore(0)
        tasks = [self.submit(job, lambda _: ended.release()) for job in jobs]
        for _ in tasks:
            ended.acquire()
        return [task.outcome for task in tasks]

    def cancel(self, task: Task[Any], failure: Failure = CANCELLED) -> None:
        """Abandon a call, unless it has ended."""
        with self._changed:
            if task.is_done:
                return
            thread = self._running.pop(task, None)
            task.finish(Outcome(None, task.ran(), failure, is_running=thread is not None), is_abandoned=True)
            if thread is not None:
                self.abandoned += 1
                self._threads -= 1
                self._start_threads()
        activity.own.tick()
        if (wait := task.wait) is not None:
            wait.cancel(failure)
        task.on_done(task)

    def close(self) -> None:
        """End the threads; calls that have not started are cancelled, a thread in a call ends after it."""
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            self._watcher = None
            self._changed.notify_all()
        for task in waiting:
            self.cancel(task)

    # -- threads

    def _start_threads(self) -> None:
        """Start the threads that the calls need; if there is none, and none can be started, the calls fail."""
        while True:
            with self._changed:
                if self._watcher is None and self.timeout < math.inf:
                    self._watcher = threading.Thread(target=self._watch, name="environment-deadlines", daemon=True)
                    with suppress(RuntimeError):
                        self._watcher.start()
                if self._threads >= min(self.max_threads, len(self._waiting) + len(self._running)):
                    return
                self._threads += 1
            name = f"environment-{next(self._numbers)}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError:  # the system's limit is reached: fewer threads do
                with self._changed:
                    self._threads -= 1
                    while self._waiting and not self._threads:
                        self.cancel(self._waiting.popleft(), NO_THREAD)
                return

    def _work(self) -> None:
        while True:
            with self._changed:
                task = next((one for one in iter(self._next_waiting, None) if not one.is_done), None)
                if task is None:
                    self._threads -= 1
                    return
                self._running[task] = threading.current_thread()
                task.start()
            outcome = copy_context().run(_execute, task)
            with self._changed:
                if task.is_abandoned:
                    self.abandoned -= 1
                    return
                del self._running[task]
                task.finish(outcome)
            activity.own.tick()
            task.on_done(task)
            del outcome, task

    def _next_waiting(self) -> Task[Any] | None:
        return self._waiting.popleft() if self._waiting else None

    # -- deadlines

    def _set_deadline(self, due: float) -> None:
        """Wake the watching thread if this deadline is before the one that it waits for."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._changed.notify_all()

    def _watch(self) -> None:
        """Watch the deadlines of running calls in a thread of its own, as the one that waits for them may be busy. It
        wakes rarely, and looks at all of them."""
        while True:
            with self._changed:
                if self._watcher is not threading.current_thread():
                    return
                now = time.perf_counter()
                overdue = [task for task in self._running if task.due <= now]
                if not overdue:
                    self._wakes_at = min((task.due for task in self._running), default=math.inf)
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for task in overdue:
                self._expire(task)

    def _expire(self, task: Task[Any]) -> None:
        """Cancel what an overdue call waits for; abandon a call that waits for nothing, or does not fail in time."""
        wait, thread = task.wait, self._running.get(task)
        if thread is None:
            return
        stack = stack_of_thread(thread) if wait is None else wait.stack()
        failure = task.late or task.timed_out(stack)
        with self._changed:
            if not task.is_overdue or task.wait is not wait:  # it has ended, was paused, or waits for something else
                return
            has_grace = wait is not None and task.late is None
            if has_grace:
                task.give_grace(failure, GRACE)
            else:
                self.last_hang = users_line(stack)
        if wait is not None and has_grace:
            wait.cancel(failure)
        else:
            self.cancel(task, failure)


def _execute(task: Task[T]) -> Outcome[T]:
    current_task.set(task)
    try:
        value = run_if_async(task.job())
    except BaseException as error:
        return Outcome(None, task.ran(), task.late or as_failure(error))
    return Outcome(None if task.late else value, task.ran(), task.late)
