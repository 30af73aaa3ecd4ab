"""vLLM inside the process, without TRL: for models that are not trained meanwhile.

What this uses of vLLM 0.31:

    LLM(model=, dtype=, seed=, max_model_len=, gpu_memory_utilization=, tensor_parallel_size=, enable_lora=,
        max_lora_rank=, generation_config="vllm", ...), LLM.generate(prompts, sampling_params, lora_request=, use_tqdm=)
    LLM.llm_engine.step         wrapped: each call of it is progress; returns completions, those that have ended
                                with `finished` set
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aitrain import activity
from aitrain.engines.batching import BatchingEngine, BatchRow
from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding
from aitrain.rollout.limits import EndOfTurn

T = TypeVar("T")


@dataclass(frozen=True)
class LocalModel:
    """What vLLM loads, and how."""

    path: str
    dtype: str
    seed: int
    context: int | None
    memory: float
    """Fraction of the GPU's memory."""
    tensor_parallel: int = 1
    adapter: Path | None = None
    rank: int = 0
    """Rank of the adapter."""
    is_on_cpu: bool = False
    trust_remote_code: bool = False


class LocalVLLMEngine(BatchingEngine):
    """Generates with a vLLM of its own; each row is sampled with its seed."""

    def __init__(
        self,
        model: LocalModel,
        sampling: Sampling,
        end: EndOfTurn,
        context: int | None = None,
        clock: RolloutClock | None = None,
    ) -> None:
        super().__init__(end, context, clock)
        self.sampling = sampling
        with activity.own.doing("starting vLLM", moves_files=True):
            self._llm, self._adapter = _start(model)

    @property
    def is_padded(self) -> bool:
        """Rows are independent of each other."""
        return False

    def sample(self, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row."""
        sampling = self.sampling.greedy if decoding is Decoding.GREEDY else self.sampling
        seeds = [None if row.seed is None else row.seed.request_seed for row in rows]
        return [
            Completion(ids) for ids in self._complete([row.prompt_ids for row in rows], sampling, max_tokens, seeds)
        ]

    async def complete(self, batch: CompletionBatch) -> list[list[int]]:
        """Token ids of one completion for each prompt."""
        seeds: Sequence[int | None] = batch.seeds or [None] * len(batch.prompts)
        return self._complete(batch.prompts, batch.sampling, batch.max_tokens, seeds)

    def _complete(
        self, prompts: list[list[int]], sampling: Sampling, max_tokens: int, seeds: Sequence[int | None]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        extras = sampling.vllm_extras(self.end.eos_ids, max_tokens)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings = {name: getattr(sampling, name) for name in names} | extras
        parameters = [
            SamplingParams(max_tokens=max_tokens, seed=seed, detokenize=bool(sampling.stop), **settings)
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._llm.generate(asked, parameters, lora_request=self._adapter, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


def _start(model: LocalModel) -> tuple[Any, Any]:
    """vLLM, and the request for the adapter; None without one."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"generation_config": "vllm"}  # not the model's own sampling defaults
    if model.adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": model.rank}
    if model.is_on_cpu:  # vLLM 0.31 ends with an error there if a prompt with a seed is processed in two parts
        longest = max(4096, model.context or 0)
        options |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    llm = LLM(
        model=model.path,
        dtype=model.dtype,
        seed=model.seed,
        max_model_len=model.context,
        gpu_memory_utilization=model.memory,
        tensor_parallel_size=model.tensor_parallel,
        trust_remote_code=model.trust_remote_code,
        **options,
    )
    llm.llm_engine.step = counting_tokens(llm.llm_engine.step)
    return llm, None if model.adapter is None else LoRARequest("adapter", 1, str(model.adapter.resolve()))


def counting_tokens(step: Callable[[], T]) -> Callable[[], T]:
    """A step of vLLM's engine that counts as progress, with the tokens of the completions that it ends."""

    def step_and_count() -> T:
        outputs = step()
        ended = [output for output in _listed(outputs) if output.finished]
        activity.add_tokens(sum(len(one.token_ids) for output in ended for one in output.outputs))
        return outputs

    return step_and_count


def _listed(outputs: Any) -> list[Any]:
    return outputs if isinstance(outputs, list) else []
