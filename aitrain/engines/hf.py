"""Generation by transformers: a batch at a time, padded on the left, drawn with torch's generator as TRL does.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py): see hf_sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain import activity
from aitrain.engines.batching import BatchingEngine, BatchRow, Largest, seeds_of
from aitrain.engines.hf_sampling import SamplingProcessor, StopStringCriterion, own_defaults_only, seeded_rows
from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding
from aitrain.rollout.limits import EndOfTurn


@dataclass(frozen=True)
class HFModel:
    """A model of transformers, and how it generates apart from the sampling options."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    unwrapped: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None
    """Prepares a model that is wrapped or sharded for one generation; None: `model` generates as it is."""
    device: torch.device | None = None
    """Device of the token ids; None: that of the model."""
    cache_implementation: str | None = None
    on_tokens: Callable[[list[int]], None] | None = None
    """Called with the newest token of each row while `generate` runs; what it raises ends the generation."""


class HFEngine(BatchingEngine):
    """Generates with a transformers model, in the mode (training or evaluation) that the model is in."""

    def __init__(
        self,
        policy: HFModel,
        sampling: Sampling,
        end: EndOfTurn,
        context: int | None = None,
        clock: RolloutClock | None = None,
        largest: Largest | None = None,
    ) -> None:
        super().__init__(end, context, clock, largest)
        self.policy, self.sampling = policy, sampling

    def sample(self, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row. In training, which samples as TRL does, seeds are
        not used."""
        sampling = self.sampling.greedy if decoding is Decoding.GREEDY else self.sampling
        return self._sample(rows, max_tokens, sampling, seeds_of(rows) if decoding is Decoding.SEEDED else [])

    async def complete(self, batch: CompletionBatch) -> list[Completion]:
        """One completion for each prompt, without dropout; not for ranks that generate together."""
        rows, seeds = [BatchRow(prompt) for prompt in batch.prompts], list(map(SampleSeed, batch.seeds or ()))
        with evaluation_mode(self.policy.model):
            return self._sample(rows, batch.max_tokens, batch.sampling, seeds)

    def _sample(
        self, rows: list[BatchRow], max_tokens: int, sampling: Sampling, seeds: list[SampleSeed]
    ) -> list[Completion]:
        """Sample each row with its own seed, if there are seeds."""
        policy = self.policy
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=sampling.temperature > 0,
            pad_token_id=policy.tokenizer.pad_token_id,
            eos_token_id=list(self.end.eos_ids) or None,
            cache_implementation=policy.cache_implementation,
            disable_compile=True,
        )
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = sampling.temperature, sampling.top_k, sampling.top_p
        prompts, pad = [row.prompt_ids for row in rows], policy.tokenizer.pad_token_id
        width, device = max(map(len, prompts)), policy.device or policy.model.device
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        criterion = StopStringCriterion(self.end, rows)
        processor = SamplingProcessor(sampling, self.end, rows)
        prepared = policy.unwrapped() if policy.unwrapped else nullcontext(policy.model)
        seeded = partial(seeded_rows, rows=lambda _: seeds) if seeds else nullcontext
        with prepared as model, torch.no_grad(), own_defaults_only(model), seeded(model):
            generated = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=[processor] if sampling.needs_processor else [],
                stopping_criteria=[criterion] if self.end.stop_strings is not None else [],
                streamer=None if policy.on_tokens is None else _TokenStream(policy.on_tokens),
            )
        answers = criterion.cut(generated[:, width:].tolist())
        activity.add_tokens(sum(map(len, answers)))
        return list(map(Completion, answers))


class _TokenStream(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Passes the tokens of `generate` on. What it gets first are the prompts."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens, self._has_prompts = on_tokens, False

    def put(self, value: torch.Tensor) -> None:
        """`value`: the prompts, shape (rows, tokens), and then the new token of each row."""
        if self._has_prompts:
            self._on_tokens(value.tolist())
        self._has_prompts = True

    def end(self) -> None:
        """No-op: `generate` returns."""
