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

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Outcome(Generic[T_co]):
    """What came of a call: its value or its failure, and the seconds that its clock ran."""

    value: T_co | None = None
    seconds: float = 0.0
    failure: Failure | None = None
    is_running: bool = False
    """Whether it still runs: its thread could not be ended."""


@dataclass(frozen=True)
class Wait:
    """Something outside its thread that a task waits for: functions to cancel it and to get its stack."""

    cancel: Callable[[Failure], object]
    stack: Callable[[], StackSummary]


class Task:
    """One call: its clock and what it waits for."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.grace = 0.0
        """Seconds that it has after its deadline."""
        self.wait: Wait | None = None
        self.is_done = False
        self.abandoned: Failure | None = None
        """Its failure, if it was abandoned, so that its result is dropped."""
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self._ran, self._since, self._pauses = 0.0, 0.0, 1  # until it begins

    def begin(self) -> None:
        """Start the clock in the calling thread, which makes the call."""
        self.thread = threading.current_thread()
        self.pause(-1)

    def pause(self, by: int) -> None:
        """Stop the clock with 1, and undo it with -1; pauses nest, also those of several threads."""
        with self._lock:
            now = time.perf_counter()
            self._ran += 0.0 if self._pauses else now - self._since
            self._since = now
            self._pauses += by

    def add_seconds(self, seconds: float) -> None:
        """Add time that passed on the clock of another machine while this one was paused."""
        with self._lock:
            self._ran += seconds

    def ran(self) -> float:
        """Seconds on the clock."""
        with self._lock:
            return self._ran + (0.0 if self._pauses else time.perf_counter() - self._since)

    def left(self) -> float:
        """Seconds to its deadline; inf while the clock is stopped."""
        return math.inf if self._pauses else self.timeout + self.grace - self.ran()


current_task: ContextVar[Task | None] = ContextVar("current_task", default=None)
"""The task that the calling code belongs to; asyncio passes it on to the coroutines that a task waits for."""


def is_abandoned() -> bool:
    """Whether the calling task was abandoned, so that its result is discarded."""
    task = current_task.get()
    return task is not None and task.abandoned is not None


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
        CallFailed: the task was abandoned, so that nothing would cancel the wait.
    """
    task = current_task.get()
    if task is None:
        yield
        return
    before, task.wait = task.wait, Wait(cancel, stack)
    try:
        if task.abandoned is not None:
            raise CallFailed(task.abandoned)
        yield
    finally:
        task.wait = before
