"""Generation by the vLLM that TRL runs in the training process.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    trl.trainer.grpo_trainer.VLLMGeneration     replaced while the trainer is made
    trl.generation.vllm_generation.LLM          replaced while vLLM is started: TRL passes no number format
    VLLMGeneration._init_vllm()                 overridden for that
    VLLMGeneration._iter_named_params()         overridden: (name, tensor) of all weights, as vLLM names them
    VLLMGeneration.sync_weights()               called; overridden where vLLM runs on the CPU
    VLLMGeneration.generate(prompts, images, num_generations)   called: (prompts, ids, log-probabilities, their ids);
                                                calls self.llm.generate(prompts, sampling_params=), once, with all
                                                prompts of the tp_group where tensors are parallel
    VLLMGeneration.generation_kwargs            replaced for each call: fields of SamplingParams, which win over TRL's
    VLLMGeneration.llm.generate                 replaced for a call whose prompts have seeds
    VLLMGeneration.tensor_parallel_size, .tp_group, ._dist          read
    VLLMGeneration.llm.llm_engine.step          wrapped: each call of it is progress
    VLLMGeneration.llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights(weights_iterator=)
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from aitrain import activity
from aitrain.engines.batching import BatchingEngine
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import replaced
from aitrain.engines.sharded_tensors import merged_weights, whole
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, GenerationRequest
from aitrain.vllm.extensions import renew_tied_head

Weights = Iterator[tuple[str, torch.Tensor]]


class ColocatedGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """TRL's vLLM, started in the trainer's number format, and synced without a change of the trainer's weights."""

    def _init_vllm(self) -> None:
        """Start vLLM in the number format that the trainer computes in: by default vLLM casts float32 weights to
        bfloat16, and its log-probabilities would differ from the trainer's."""
        before = vllm_generation.LLM
        autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.accelerator.mixed_precision))
        dtype = autocast or str(self.accelerator.unwrap_model(self.model).dtype).removeprefix("torch.")

        def start(**options: Any) -> Any:
            options |= {"dtype": dtype, "generation_config": "vllm"}  # not the model's own sampling defaults
            if self._is_on_cpu:  # vLLM 0.31 ends with an error there if a prompt with a seed is processed in two parts
                longest = max(options["max_num_batched_tokens"], options["max_model_len"] or 0)
                options |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": longest}
            return before(**options)

        with replaced(vllm_generation, {"LLM": start}), activity.own.doing("starting vLLM", moves_files=True):
            super()._init_vllm()
        self.llm.llm_engine.step = counting_steps(self.llm.llm_engine.step)

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self.accelerator.device.type == "cpu")

    def _iter_named_params(self) -> Weights:
        """All weights; with LoRA, the sum of base and adapter. TRL would merge and unmerge the adapter in the base,
        which changes a bfloat16 base by 2 percent in a hundred syncs."""
        model = self.accelerator.unwrap_model(self.model)
        if self._dist.is_fsdp or isinstance(model, PeftModel):
            yield from ((name, whole(weight)) for name, weight in merged_weights(model))
        else:
            yield from super()._iter_named_params()

    def sync_weights(self) -> None:
        """Sync the weights. On the CPU vLLM repacks its weights, so it must load the new ones like a checkpoint."""
        with activity.own.doing("weight sync"):
            if not self._is_on_cpu:
                super().sync_weights()
                return
            runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
            runner.reload_weights(weights_iterator=self._iter_named_params())
            renew_tied_head(runner.get_model())
            self.llm.reset_prefix_cache()


class ColocatedEngine(BatchingEngine):
    """Generates with TRL's vLLM, which gets the policy's weights when their version has changed, and samples each
    prompt with its seed."""

    is_padded = False

    def __init__(
        self, generation: VLLMGeneration, sampling: Sampling, end: EndOfTurn, context: int | None = None
    ) -> None:
        """Ranks generate together if they share vLLM, as TRL hands completions out by position, or the weights."""
        accelerator = generation.accelerator
        is_shared = accelerator.num_processes > 1 and (generation.tensor_parallel_size > 1 or generation._dist.is_fsdp)
        super().__init__(end, context, accelerator if is_shared else None)
        self.sampling, self._generation = sampling, generation

    async def sync_weights(self, version: int) -> None:
        """Sync the policy's weights."""
        self._generation.sync_weights()

    def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, with its own seed."""
        generation = self._generation
        settings = {"generation_kwargs": sampling.as_vllm(self.end.eos_ids, max_tokens)}
        seeded = {"generate": self._seeded_generate([row.seed.request_seed for row in rows])}
        with replaced(generation, settings), replaced(generation.llm, seeded):
            _, ids, logprobs, _ = generation.generate(
                prompts=[row.prompt_ids for row in rows], images=None, num_generations=1
            )
        return [Completion(row, [first for first, *_ in values]) for row, values in zip(ids, logprobs, strict=True)]

    def _seeded_generate(self, seeds: list[int]) -> Callable[..., Any]:
        """vLLM's `generate` with a seed for each prompt: of all ranks that share this vLLM, in TRL's order."""
        generation, generate = self._generation, self._generation.llm.generate
        if generation.tensor_parallel_size > 1:
            gathered: list[list[int]] = [[]] * generation.tensor_parallel_size
            torch.distributed.all_gather_object(gathered, seeds, group=generation.tp_group)
            seeds = [seed for part in gathered for seed in part]

        def seeded(prompts: list[Any], sampling_params: Any, **options: Any) -> Any:
            each = [copy.copy(sampling_params) for _ in prompts]
            for parameters, seed in zip(each, seeds, strict=True):
                parameters.seed = seed
            return generate(prompts, sampling_params=each, **options)

        return seeded


def counting_steps(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step of vLLM's engine that counts as progress."""

    def step_and_tick() -> Any:
        activity.tick()
        return step()

    return step_and_tick
