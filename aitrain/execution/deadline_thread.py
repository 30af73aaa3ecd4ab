"""The thread that watches the deadlines of running tasks, as the thread that waits for them may be busy."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from traceback import StackSummary

from aitrain.execution.failure import Failure
from aitrain.execution.stacks import stack_of_thread
from aitrain.execution.task import Task, Wait

GRACE = 5.0
"""Seconds that a task has to fail after its wait was cancelled; then its thread is abandoned."""

Abandon = Callable[[Task[object], Failure, StackSummary], None]
"""Called with a task that hangs, its failure and the stack of its thread."""


class DeadlineThread:
    """Cancels the wait of each overdue task, and calls `abandon` for those without a wait or that do not fail in time.

    All tasks have the same timeout, so the thread wakes rarely, and checks all of them each time.
    """

    def __init__(
        self, lock: threading.RLock, running: Mapping[Task[object], threading.Thread], abandon: Abandon
    ) -> None:
        self._running, self._abandon = running, abandon
        self._thread: threading.Thread | None = None
        self._wake_up = threading.Condition(lock)
        self._wakes_at = math.inf

    def start(self) -> None:
        """Start the thread, unless it runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="environment-deadlines", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """End the thread."""
        with self._wake_up:
            thread, self._thread = self._thread, None
            self._wake_up.notify_all()
        if thread is not None:
            thread.join(1.0)

    def set_deadline(self, due: float) -> None:
        """Wake the thread if this deadline is before the one that it waits for."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._wake_up.notify()

    def _watch(self) -> None:
        while True:
            with self._wake_up:
                if self._thread is not threading.current_thread():
                    return
                now = time.perf_counter()
                overdue = [task for task in self._running if task.due <= now]
                if not overdue:
                    self._wakes_at = min((task.due for task in self._running), default=math.inf)
                    self._wake_up.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for task in overdue:
                self._expire(task)

    def _expire(self, task: Task[object]) -> None:
        wait, thread = task.wait, self._running.get(task)
        if wait is not None and task.late is None:
            self._cancel(task, wait)
        elif thread is not None:
            stack = stack_of_thread(thread) if wait is None else wait.stack()
            self._abandon(task, task.late or task.timed_out(stack), stack)

    def _cancel(self, task: Task[object], wait: Wait) -> None:
        failure = task.timed_out(wait.stack())
        with self._wake_up:
            if not task.is_overdue:  # it has ended or was paused meanwhile
                return
            task.give_grace(failure, GRACE)
        wait.cancel(failure)
