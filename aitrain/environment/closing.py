"""Calls `close` of the environment at the end of a run, once in each process that has called the environment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aitrain.environment.call_policy import Notify
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.processes import ProcessPool
from aitrain.execution.task import Task


@dataclass(frozen=True)
class EnvCloser:
    """Closes the environment of its process."""

    environment: Any

    def close(self) -> object:
        """What the environment's `close` returns; an awaitable is awaited by the caller."""
        return self.environment.close()


def close_environment(environment: object, pool: DeadlinePool, processes: ProcessPool | None, notify: Notify) -> None:
    """Close the environment here and in all of its processes, each within the deadline of a call. A failure is shown
    and changes nothing else: the run is over."""
    if not callable(getattr(environment, "close", None)):
        return
    leases = [] if processes is None else processes.lease_idle(EnvCloser)
    closers: list[Callable[[], object]] = [EnvCloser(environment).close]
    closers += [partial(lease.call, "close") for lease in leases]
    tasks = _call_all(closers, pool)
    for lease in leases:
        lease.release()
    for failure in (task.outcome.failure for task in tasks):
        if failure is not None:
            notify(f"{type(environment).__name__}.close {failure.message}")
            return


def _call_all(jobs: list[Callable[[], object]], pool: DeadlinePool) -> list[Task[object]]:
    """The finished tasks."""
    ended = threading.Semaphore(0)
    tasks = [pool.submit(job, lambda _: ended.release()) for job in jobs]
    for _ in tasks:
        ended.acquire()
    return tasks
