"""One call into the user's code: its clock, what it waits for, and its outcome."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import StackSummary
from typing import Generic, TypeVar

from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.user_code import users_line

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Outcome(Generic[T_co]):
    """The result of a call: its value or its failure, and the seconds that its clock ran."""

    value: T_co | None = None
    seconds: float = 0.0
    failure: Failure | None = None
    is_running: bool = False
    """Whether its thread could not be ended, and still makes the call."""


@dataclass(frozen=True)
class Wait:
    """Something outside its thread that a task waits for: functions to cancel it and to get its stack."""

    cancel: Callable[[Failure], object]
    stack: Callable[[], StackSummary]


class Task(Generic[T_co]):
    """One call in a DeadlinePool. `lock` is the pool's; `set_deadline` is called under the lock when `due` changes."""

    def __init__(
        self,
        job: Callable[[], T_co],
        on_done: Callable[[Task[T_co]], None],
        timeout: float,
        lock: threading.Condition,
        set_deadline: Callable[[float], None],
    ) -> None:
        self.job, self.on_done, self.timeout = job, on_done, timeout
        self.outcome: Outcome[T_co] = Outcome()
        self.is_done = False
        self.is_abandoned = False
        self.wait: Wait | None = None
        self.late: Failure | None = None
        """The failure of a task whose wait was cancelled at the deadline."""
        self._lock, self._set_deadline = lock, set_deadline
        self._budget = timeout
        self._ran = 0.0
        self._since: float | None = None  # None: the clock is stopped
        self._pauses = 0

    def start(self) -> None:
        """Start the clock."""
        self._set_clock(runs=True)

    def pause(self, by: int) -> None:
        """Stop the clock with 1, and undo it with -1; pauses nest, also those of several threads."""
        with self._lock:
            self._pauses += by
            self._set_clock(runs=not self._pauses)

    def add_seconds(self, seconds: float) -> None:
        """Add time that passed on the clock of another machine while this one was paused."""
        with self._lock:
            self._ran += seconds

    def _set_clock(self, runs: bool) -> None:
        with self._lock:
            self._ran, self._since = self.ran(), time.perf_counter() if runs else None
            if not self.is_done:
                self._set_deadline(self.due)

    def ran(self) -> float:
        """Seconds on the clock."""
        with self._lock:
            return self._ran + (0.0 if self._since is None else time.perf_counter() - self._since)

    @property
    def due(self) -> float:
        """The deadline on the clock of `time.perf_counter`; inf while the task's clock is stopped."""
        return math.inf if self._since is None else self._since + self._budget - self._ran

    @property
    def is_overdue(self) -> bool:
        """Whether it is past its deadline and has not ended."""
        return not self.is_done and self.due <= time.perf_counter()

    def begin_wait(self, wait: Wait) -> Wait | None:
        """Note what the task waits for; returns the enclosing wait.

        Raises:
            CallFailed: the task was abandoned, so that nothing would cancel the wait.
        """
        with self._lock:
            if self.is_abandoned and self.outcome.failure is not None:
                raise CallFailed(self.outcome.failure)
            before, self.wait = self.wait, wait
        return before

    def give_grace(self, failure: Failure, seconds: float) -> None:
        """Fail with `failure` after at most `seconds` more seconds."""
        self.late, self._budget = failure, self.ran() + seconds
        self._set_deadline(self.due)

    def finish(self, outcome: Outcome[T_co], is_abandoned: bool = False) -> None:
        """Set the outcome, once."""
        self.outcome, self.is_done, self.is_abandoned = outcome, True, is_abandoned

    def timed_out(self, stack: StackSummary) -> Failure:
        """The failure of a task that has this stack at its deadline."""
        lines = [f"timed out: no answer within {self.timeout:g} s", users_line(stack)]
        return Failure("timed_out", "\n".join(line for line in lines if line), "".join(stack.format()))


current_task: ContextVar[Task[object] | None] = ContextVar("current_task", default=None)
"""The task that the calling code belongs to; asyncio passes it on to the coroutines that a task waits for."""


def remaining() -> float | None:
    """Seconds that the calling task has left; None outside of a task."""
    task = current_task.get()
    return None if task is None else max(0.0, task.timeout - task.ran())


def is_abandoned() -> bool:
    """Whether the calling task was abandoned, so that its result is discarded."""
    task = current_task.get()
    return task is not None and task.is_abandoned


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of the calling task in this context, such as while it waits for the model."""
    task = current_task.get()
    if task is None:
        yield
        return
    task.pause(1)
    try:
        yield
    finally:
        task.pause(-1)


@contextmanager
def on_cancel(cancel: Callable[[Failure], object], stack: Callable[[], StackSummary]) -> Iterator[None]:
    """Context in which the calling task waits for something outside its thread: at the deadline, `cancel` is called
    with the failure, whose stack is that of `stack`.

    Raises:
        CallFailed: the task was abandoned.
    """
    task = current_task.get()
    if task is None:
        yield
        return
    before = task.begin_wait(Wait(cancel, stack))
    try:
        yield
    finally:
        task.wait = before
