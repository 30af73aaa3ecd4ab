"""The engines that TRL's trainer brings: transformers' generate, vLLM in this process, and TRL's client of a server.

Where this depends on the inside of TRL 1.16 (tests/training/test_upstream.py):

    GRPOTrainer._generate_single_turn(ids, images, fields, n)   called for each round: (ids, log-probabilities)
    GRPOTrainer.generation_config, .generation_kwargs       replaced: max_new_tokens, and everything for greedy decoding
    GRPOTrainer.vllm_generation.max_completion_length, .temperature, .top_k, .top_p   replaced likewise
    GRPOTrainer.vllm_generation.generation_kwargs           replaced likewise: further fields of vLLM's SamplingParams
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from aitrain.engines.batching import BatchingEngine, BatchRow, seeds_of
from aitrain.engines.hf_sampling import LocalSampling
from aitrain.engines.row_sampling import seeded_rows
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding
from aitrain.rollout.limits import EndOfTurn
from aitrain.training.scopes import replaced

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


class TrainerEngine(BatchingEngine):
    """Generation by TRL's trainer, with the trainer's weights and sampling options."""

    def __init__(self, trainer: EpisodeTrainer, end: EndOfTurn, context: int | None, clock: RolloutClock) -> None:
        super().__init__(end, context, clock)
        self._trainer = trainer

    @property
    def weight_version(self) -> int:
        """Optimizer steps that the policy has done: TRL syncs its vLLM before it generates."""
        return int(self._trainer.state.global_step)

    @property
    def is_padded(self) -> bool:
        """vLLM in this process pads nothing."""
        return not self._trainer.use_vllm or self._trainer.vllm_mode == "server"

    @property
    def is_shared(self) -> bool:
        """Whether several ranks generate together: TRL hands the completions out by position, and would wait for a rank
        that does not ask."""
        trainer = self._trainer
        if trainer.accelerator.num_processes == 1:
            return False
        has_one_engine = trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1
        return bool((trainer.use_vllm and has_one_engine) or trainer.is_sharded)

    def agree(self, rows: int, max_tokens: int) -> tuple[int, int]:
        """All ranks bring the same number of rows, the missing ones made up."""
        if not self.is_shared:
            return rows, max_tokens
        accelerator = self._trainer.accelerator
        wanted = torch.tensor([[rows, max_tokens]], device=accelerator.device)
        rows, max_tokens = accelerator.gather(wanted).max(dim=0).values.tolist()
        return rows, max_tokens

    def sample(self, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
        """One completion for each row, from transformers or TRL's vLLM."""
        prompts = [row.prompt_ids for row in rows]
        with self._greedy() if decoding is Decoding.GREEDY else nullcontext(), self._seeded(rows, decoding):
            if self._trainer.use_vllm:
                ids, logprobs = self._by_vllm(prompts, max_tokens)
            else:
                ids, logprobs = self._by_transformers(prompts, max_tokens, [row.begun for row in rows]), None
        return [Completion(each, logprobs[n] if logprobs else None) for n, each in enumerate(ids)]

    def _by_vllm(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[list[float]] | None]:
        trainer = self._trainer
        extras = trainer.sampling.vllm_extras(self.end.eos_ids, max_tokens)
        settings = {"max_completion_length": max_tokens, "generation_kwargs": extras}
        with replaced(trainer.vllm_generation, settings):
            ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
        return ids, logprobs

    def _by_transformers(self, prompts: list[list[int]], max_tokens: int, begun: list[int]) -> list[list[int]]:
        trainer = self._trainer
        local = LocalSampling(trainer.sampling, self.end.eos_ids, self.end.stop_strings, prompts, begun)
        policy = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        with replaced(trainer.generation_config, {"max_new_tokens": max_tokens}), local.applied(policy):
            ids, _ = trainer._generate_single_turn(prompts, None, {}, 1)
        return local.cut(ids)

    def by_vllm_for_environment(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        """vLLM for an environment that calls `model.generate`: with the sampling of that call, not of the run."""
        max_tokens, seeds = sampling.pop("max_new_tokens"), sampling.pop("seeds", None)
        extras = {"stop_token_ids": list(self.end.eos_ids)}
        settings = {**sampling, "max_completion_length": max_tokens, "generation_kwargs": extras, "seeds": seeds}
        with replaced(self._trainer.vllm_generation, settings):
            ids, _ = self._trainer._generate_single_turn(prompts, None, {}, 1)
        return list(ids)

    def _seeded(self, rows: list[BatchRow], decoding: Decoding) -> AbstractContextManager[None]:
        """Each row is sampled with its seed: always by vLLM, by transformers only if the decoding says so, as training
        draws what TRL draws."""
        trainer, seeds = self._trainer, seeds_of(rows)
        if trainer.use_vllm:
            return replaced(trainer.vllm_generation, {"seeds": [seed.request_seed for seed in seeds] or None})
        if not seeds or decoding is not Decoding.SEEDED or trainer.use_transformers_continuous_batching:
            return nullcontext()
        return seeded_rows(trainer.accelerator.unwrap_model(trainer.model), lambda rows: seeds)

    @contextmanager
    def _greedy(self) -> Iterator[None]:
        """The likeliest token every time."""
        trainer = self._trainer
        if trainer.use_vllm:
            with replaced(trainer.vllm_generation, {"temperature": 0.0, "top_k": -1, "top_p": 1.0}):
                yield
            return
        likeliest = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        settings = trainer.generation_kwargs | likeliest
        config = GenerationConfig(**settings, disable_compile=True)
        with replaced(trainer, {"generation_config": config, "generation_kwargs": settings}):
            yield
