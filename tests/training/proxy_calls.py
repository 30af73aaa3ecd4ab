"""Jobs that call the model, as the environment's calls do while episodes are scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

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
        batcher.on_call_end()
        return outcome

    async def all_of() -> list[Outcome[Any]]:
        async with batcher.serving_calls(lambda: min(left, pool.max_calls)):
            return await asyncio.gather(*map(call, jobs))

    return asyncio.run(all_of())


def peaked_model(folder: Path) -> LlamaForCausalLM:
    """A model with weights so large that each next token is certain and depends on every token before it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(8)
    return model
