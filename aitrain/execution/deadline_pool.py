"""Threads for calls into the user's code, each call with a deadline.

Python cannot end a thread. A thread whose call hangs is abandoned: the call fails with its stack, and the thread leaves
the pool, is counted, and ends when its call ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from traceback import StackSummary
from typing import Any, TypeVar

from aitrain import activity
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.deadline_thread import DeadlineThread
from aitrain.execution.failure import Failure, as_failure
from aitrain.execution.task import Outcome, Task, current_task
from aitrain.execution.user_code import users_line

T = TypeVar("T")

CANCELLED = Failure("raised", "cancelled: the result is no longer needed")
NO_THREAD = Failure("raised", "no thread can be started: the system's limit is reached, and all threads of calls hang")


class DeadlinePool:
    """Runs calls in at most `threads` threads, started on demand; each call has `timeout` seconds from its start."""

    def __init__(self, threads: int, timeout: float) -> None:
        self.max_threads, self.timeout = threads, timeout
        self.abandoned = 0
        """Threads of abandoned calls that are still running."""
        self.last_hang = ""
        """The line of the user's code at which the last abandoned call hangs."""
        self._exchange: _LoopExchange | None = None
        self._numbers = itertools.count(1)
        self._queue: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # protects the attributes below and the tasks' clocks
        self._threads: set[threading.Thread] = set()
        self._running: dict[Task[object], threading.Thread] = {}
        self._unfinished = 0
        self._deadlines = DeadlineThread(self._lock, self._running, self._abandon_hanging)

    def submit(self, job: Callable[[], T], on_done: Callable[[Task[T]], None]) -> Task[T]:
        """Call `job` in a thread as soon as one is free; an awaitable that it returns is awaited on the shared loop.
        `on_done`, which must not block, is called once, in a thread of the pool, when the call has ended or was
        abandoned.

        Raises:
            RuntimeError: no thread can be started.
        """
        task = Task(job, on_done, self.timeout, self._lock, self._deadlines.set_deadline)
        self._enqueue([task])
        return task

    async def call(self, job: Callable[[], T], timeout: float | None = None) -> Outcome[T]:
        """The outcome of `job`, awaited on the running event loop; a call whose awaiting task is cancelled is
        abandoned. `timeout` takes the place of the pool's."""
        loop = asyncio.get_running_loop()
        if self._exchange is None or self._exchange.loop is not loop:
            self._exchange = _LoopExchange(loop, self._enqueue)
        exchange, future = self._exchange, loop.create_future()
        on_done = partial(exchange.deliver, future)
        seconds = self.timeout if timeout is None else timeout
        task: Task[T] = Task(job, on_done, seconds, self._lock, self._deadlines.set_deadline)
        exchange.send(task, future)
        try:
            outcome: Outcome[T] = await future
        except BaseException:
            if not exchange.withdraw(task):
                self.cancel(task)
            raise
        return outcome

    def cancel(self, task: Task[object], failure: Failure = CANCELLED) -> None:
        """Abandon a call, unless it has ended."""
        with self._lock:
            if task.is_done:
                return
            self._abandon(task, failure)
        self._notify_abandoned(task, failure)

    def close(self) -> None:
        """End the threads; calls that have not started are cancelled, a thread in a call ends after it."""
        with self._lock:
            waiting = self._take_queued()
            threads, self._threads = self._threads, set()
            tasks, self._queue = self._queue, queue.SimpleQueue()
        for task in waiting:
            self.cancel(task)
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join(1.0)
        self._deadlines.stop()

    # -- threads

    def _enqueue(self, tasks: Sequence[Task[Any]]) -> None:
        """Queue calls for the threads.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._lock:
            self._unfinished += len(tasks)
            try:
                self._start_threads()
            except BaseException:
                self._unfinished -= len(tasks)
                for task in tasks:
                    task.finish(Outcome(failure=NO_THREAD))
                raise
            for task in tasks:
                self._queue.put(task)

    def _start_threads(self) -> None:
        """Start the threads that the unfinished calls need.

        Raises:
            RuntimeError: there is no thread, and none can be started.
        """
        if self.timeout < math.inf:
            self._deadlines.start()
        while len(self._threads) < min(self.max_threads, self._unfinished):
            name = f"environment-{next(self._numbers)}"
            thread = threading.Thread(target=self._work, args=(self._queue,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system's limit is reached: fewer threads do
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
            del task  # frees the result while the thread waits

    def _start(self, task: Task[object]) -> bool:
        with self._lock:
            if not task.is_done:
                self._running[task] = threading.current_thread()
                task.start()
            return not task.is_done

    def _finish(self, task: Task[object], outcome: Outcome[object]) -> bool:
        """Set the outcome, unless the call was abandoned: then its thread ends."""
        with self._lock:
            if task.is_abandoned:
                self.abandoned -= 1
                return False
            del self._running[task]
            self._unfinished -= 1
            task.finish(outcome)
            activity.own.tick()
            return True

    # -- abandoned calls

    def _abandon_hanging(self, task: Task[object], failure: Failure, stack: StackSummary) -> None:
        with self._lock:
            if not task.is_overdue or (task.wait is not None and task.late is None):  # it was paused or waits again
                return
            self.last_hang = users_line(stack)
            self._abandon(task, failure)
        self._notify_abandoned(task, failure)

    def _abandon(self, task: Task[object], failure: Failure) -> None:
        thread = self._running.pop(task, None)
        task.finish(Outcome(None, task.ran(), failure, is_running=thread is not None), is_abandoned=True)
        self._unfinished -= 1
        activity.own.tick()
        if thread is not None:
            self._threads.discard(thread)
            self.abandoned += 1
            with suppress(RuntimeError):  # see _notify_abandoned
                self._start_threads()

    def _notify_abandoned(self, task: Task[object], failure: Failure) -> None:
        wait = task.wait
        if wait is not None:
            wait.cancel(failure)
        task.on_done(task)
        with self._lock:
            waiting = [] if self._threads else self._take_queued()
        for other in waiting:
            self.cancel(other, NO_THREAD)

    def _take_queued(self) -> list[Task[object]]:
        tasks = []
        with suppress(queue.Empty):
            while (task := self._queue.get_nowait()) is not None:
                tasks.append(task)
        return tasks


class _LoopExchange:
    """Batches calls from an event loop to the threads, and outcomes from the threads to the loop.

    Calls of one iteration of the loop are enqueued together at its end, as each thread that starts earlier competes
    with the loop for the GIL. Outcomes that arrive together wake the loop once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, enqueue: Callable[[Sequence[Task[Any]]], None]) -> None:
        self.loop = loop
        self._enqueue = enqueue
        self._leaving: dict[Task[Any], asyncio.Future[Any]] = {}
        self._arrived: deque[tuple[asyncio.Future[Any], Outcome[Any]]] = deque()
        self._is_waking = self._is_sending = False

    def send(self, task: Task[T], future: asyncio.Future[Outcome[T]]) -> None:
        """Enqueue the task at the end of this iteration; the future gets the error if that cannot be done."""
        if not self._is_sending:
            self._is_sending = True
            self.loop.call_soon(self._send_all)
        self._leaving[task] = future

    def withdraw(self, task: Task[Any]) -> bool:
        """Drop a task that has not been enqueued; returns whether it was one."""
        return self._leaving.pop(task, None) is not None

    def _send_all(self) -> None:
        self._is_sending = False
        leaving = {task: future for task, future in self._leaving.items() if not future.cancelled()}
        for task in leaving:
            del self._leaving[task]
        try:
            self._enqueue(list(leaving))
        except RuntimeError as error:
            for future in leaving.values():
                if not future.done():
                    future.set_exception(error)

    def deliver(self, future: asyncio.Future[Outcome[T]], task: Task[T]) -> None:
        """Resolve the future with the task's outcome; called in any thread."""
        self._arrived.append((future, task.outcome))
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._resolve_all)

    def _resolve_all(self) -> None:
        self._is_waking = False
        while self._arrived:
            future, outcome = self._arrived.popleft()
            if not future.done():
                future.set_result(outcome)


def _execute(task: Task[T]) -> Outcome[T]:
    current_task.set(task)
    try:
        value = run_if_async(task.job())
    except BaseException as error:
        return Outcome(None, task.ran(), task.late or as_failure(error))
    return Outcome(None if task.late else value, task.ran(), task.late)
