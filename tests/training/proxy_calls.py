"""Jobs that call the model, as the environment's calls do while episodes are scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aitrain.engines.proxy_batcher import ProxyBatcher
from aitrain.execution.deadline_pool import DeadlinePool
from aitrain.execution.task import Outcome


def run_with(pool: DeadlinePool, batcher: ProxyBatcher, jobs: Sequence[Callable[[], Any]]) -> list[Outcome[Any]]:
    """The outcome of each job, all of them at the same time, with a model that serves their calls."""
    left = len(jobs)

    async def call(job: Callable[[], Any]) -> Outcome[Any]:
        nonlocal left
        outcome = await pool.call(job)
        left -= 1
        return outcome

    async def all_of() -> list[Outcome[Any]]:
        async with batcher.serving_calls(lambda: min(left, pool.max_calls)):
            return await asyncio.gather(*map(call, jobs))

    return asyncio.run(all_of())
