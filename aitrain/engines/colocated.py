"""TRL's vLLM generation, with two of its ways mended: how weights reach a vLLM on the CPU, and how LoRA is handed over.

Where we lean on the inside of TRL 1.16 (tests/training/test_upstream.py):

    trl.trainer.grpo_trainer.VLLMGeneration     replaced while the trainer is made
    trl.generation.vllm_generation.LLM          replaced while vLLM is started: TRL passes no number format
    VLLMGeneration._init_vllm()                 overridden for that
    VLLMGeneration._iter_named_params()         overridden: (name, tensor) of all weights, as vLLM names them
    VLLMGeneration.generate()                   overridden: calls self.llm.generate(prompts, sampling_params=), once,
                                                with all prompts of the tp_group where tensors are parallel
    VLLMGeneration.sync_weights()               overridden where vLLM runs on the CPU
    VLLMGeneration.vllm_client.session                     a requests.Session, given a deadline
    VLLMGeneration.llm.llm_engine.step                      wrapped: each call of it is progress
    VLLMGeneration.llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights(weights_iterator=)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from peft import PeftModel
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from aitrain import activity
from aitrain.engines.merged_weights import merged_weights
from aitrain.engines.tied_head import renew_tied_head

DEADLINE = 600.0
"""Seconds until a server must have answered. TRL tries six times."""

T = TypeVar("T")
Weights = Iterator[tuple[str, torch.Tensor]]


def set_deadline(session: Any, seconds: float = DEADLINE) -> None:
    """For each try of every request of a `requests.Session`: TRL sets none."""
    session.request = partial(session.request, timeout=seconds)


def _ticking(step: Callable[[], T]) -> Callable[[], T]:
    """One step of the engine, a token for each of its sequences, is progress."""

    def tick_and_step() -> T:
        activity.tick()
        return step()

    return tick_and_step


class ColocatedGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """vLLM beside the trainer, or TRL's client of a server; neither ever writes to the weights that it hands over.

    `seeds`, one for each prompt of the next `generate`, decide what is sampled beside the trainer; TRL's client asks
    for all prompts at once and cannot pass them on.
    """

    def __init__(self, *arguments: Any, run_seed: int, **options: Any) -> None:
        self.run_seed = run_seed
        self.seeds: list[int] | None = None
        super().__init__(*arguments, **options)

    def _init_vllm(self) -> None:
        """In the number format that the trainer computes in: vLLM would take float32 weights for bfloat16, and the
        probabilities that it says would not be those that the trainer sees."""
        if self.mode != "colocate" or not hasattr(vllm_generation, "LLM"):
            with activity.own.doing("connecting to vLLM's server"):
                super()._init_vllm()
            if self.mode == "server" and self.accelerator.is_main_process:
                set_deadline(self.vllm_client.session)
            return
        before = vllm_generation.LLM

        def start(**options: Any) -> Any:
            ours = {"dtype": self._dtype, "seed": self.run_seed + options["seed"]}
            ours |= {"generation_config": "vllm"}  # not the model's own sampling defaults
            return before(**{**options, **ours, **({"enforce_eager": True} if self._is_on_cpu else {})})

        vllm_generation.LLM = start
        try:
            with activity.own.doing("starting vLLM", moves_files=True):
                super()._init_vllm()
        finally:
            vllm_generation.LLM = before
        self.llm.llm_engine.step = _ticking(self.llm.llm_engine.step)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """TRL's, each prompt sampled with its own seed where there are `seeds`."""
        if self.seeds is None or self.mode != "colocate":
            return super().generate(*arguments, **options)
        engine: Any = self.llm  # type: ignore[has-type]
        self.llm = _SeededEngine(engine, self._seeds_of_all())
        try:
            return super().generate(*arguments, **options)
        finally:
            self.llm = engine

    def _seeds_of_all(self) -> list[int]:
        """Of the prompts of all processes that share this engine, in TRL's order."""
        assert self.seeds is not None
        if self.tensor_parallel_size == 1:
            return self.seeds
        gathered: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, self.seeds, group=self.tp_group)
        return [seed for seeds in gathered for seed in seeds]

    @property
    def _dtype(self) -> str:
        autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.accelerator.mixed_precision))
        return autocast or str(self.accelerator.unwrap_model(self.model).dtype).removeprefix("torch.")

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self.accelerator.device.type == "cpu")

    def _iter_named_params(self) -> Weights:
        """With LoRA, base plus adapter, added up on the way. TRL merges the adapter into the base and subtracts it
        again, which moves a base in bfloat16 by 2 percent in a hundred times."""
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel) and not self._is_sharded:
            yield from merged_weights(model)
        else:
            yield from super()._iter_named_params()

    @property
    def _is_sharded(self) -> bool:
        return bool(self._dist.is_fsdp) or self.accelerator.state.deepspeed_plugin is not None

    def sync_weights(self) -> None:
        """Hand the weights over. On the CPU vLLM has repacked its own, so that it must load them like a checkpoint."""
        with activity.own.doing("weight sync"):
            self._sync_weights()

    def _sync_weights(self) -> None:
        if self.mode != "colocate" or not self._is_on_cpu:
            super().sync_weights()
            return
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        renew_tied_head(runner.get_model())
        self.llm.reset_prefix_cache()


class _SeededEngine:
    """vLLM's engine, which samples each prompt of a `generate` with its own seed."""

    def __init__(self, engine: Any, seeds: list[int]) -> None:
        self._engine, self._seeds = engine, seeds

    def generate(self, prompts: list[Any], sampling_params: Any, **options: Any) -> Any:
        """As the engine does it."""
        each = [copy.copy(sampling_params) for _ in prompts]
        for parameters, seed in zip(each, self._seeds, strict=True):
            parameters.seed = seed
        return self._engine.generate(prompts, sampling_params=each, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
