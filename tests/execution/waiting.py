"""Waiting for what happens in another thread or process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.task import Outcome


def eventually(is_so: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether it comes true within these seconds."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Clock:
    """Stands in for the module `time` of the deadlines: its time passes when the test says so."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


def at_deadline(clock: Clock, pool: DeadlinePool, job: Callable[[], Any], hangs: Callable[[], object]) -> Outcome[Any]:
    """The outcome of a call whose deadline comes when it hangs, however long it takes until then."""
    outcomes = list[Outcome[Any]]()
    caller = threading.Thread(target=lambda: outcomes.extend(pool.call_all([job])))
    caller.start()
    assert eventually(hangs)
    clock.now += pool.timeout + 1e-9  # the sum of times is rounded
    caller.join()
    return outcomes[0]
