"""Stub until the real one is merged."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aitrain.environment.contract import finished
from aitrain.environment.workers import Outcome, failure_of


class DeadlinePool:
    abandoned = 0
    running = 0

    def __init__(self, threads: int, timeout: float) -> None:
        self._threads, self._timeout = threads, timeout
        self._pool = ThreadPoolExecutor(threads)

    async def call(self, job: Callable[[], Any]) -> Outcome:
        def work() -> Outcome:
            start = time.perf_counter()
            self.running += 1
            try:
                return Outcome(finished(job()), time.perf_counter() - start)
            except BaseException as error:
                return Outcome(None, time.perf_counter() - start, failure_of(error))
            finally:
                self.running -= 1

        return await asyncio.get_running_loop().run_in_executor(self._pool, contextvars.Context().run, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False)
