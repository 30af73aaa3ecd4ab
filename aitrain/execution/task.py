"""One call into the user's code: its clock, what it waits for, and its outcome."""

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

T = TypeVar("T")

POLL = 1.0
"""Maximum seconds between two checks of the deadline of a call that waits, as its clock may be paused meanwhile."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a call: its value or its failure, and the seconds that its clock ran."""

    value: T | None = None
    seconds: float = 0.0
    failure: Failure | None = None
    is_running: bool = False
    """Whether it still runs: its thread could not be ended."""


class Task:
    """One call: its clock and what it waits for."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.stack: Callable[[], StackSummary] | None = None
        """The stack of what it waits for outside its thread; None: it waits for nothing."""
        self.abandoned: Failure | None = None
        """The failure that replaces its result once it has timed out or was cancelled; None before."""
        self._lock = threading.Lock()
        self._ran, self._since, self._pauses = 0.0, 0.0, 1  # until it begins

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
        return math.inf if self._pauses else self.timeout - self.ran()

    def time_out(self, stack: StackSummary) -> Failure:
        """Abandon it with the line that it has reached; returns its failure, which may be an earlier one."""
        if self.abandoned is None:
            message = f"timed out: no answer within {self.timeout:g} s\n{users_line(stack)}".rstrip()
            self.abandoned = Failure("timed_out", message, "".join(stack.format()))
        return self.abandoned


current_task: ContextVar[Task | None] = ContextVar("current_task", default=None)
"""The task that the calling code belongs to; asyncio passes it on to the coroutines that a task waits for."""


def is_abandoned() -> bool:
    """Whether the calling task was abandoned, so that its result is discarded."""
    task = current_task.get()
    return task is not None and task.abandoned is not None


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of the calling task in this context, such as while it waits for the model."""
    task = current_task.get() or Task(math.inf)
    task.pause(1)
    try:
        yield
    finally:
        task.pause(-1)


def wait_until(look: Callable[[float], T], stack: Callable[[], StackSummary]) -> T:
    """Call `look` with a number of seconds to wait, again and again, until it returns something true.

    `stack` returns the stack of what is waited for, which is outside the calling thread; a timeout is reported with it.

    Raises:
        CallFailed: the deadline of the calling task came first, or the task was abandoned.
    """
    task = current_task.get() or Task(math.inf)
    before, task.stack = task.stack, stack
    try:
        while not (found := look(min(POLL, max(0.0, task.left())))):
            if task.left() <= 0:
                task.time_out(stack())
            if task.abandoned is not None:
                raise CallFailed(task.abandoned)
        return found
    finally:
        task.stack = before
