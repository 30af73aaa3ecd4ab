"""Generation by transformers: a batch at a time, padded on the left, drawn with torch's generator as TRL does.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py): see hf_sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain import activity
from aitrain.engines.batching import BatchingEngine, BatchRow, Largest, seeds_of
from aitrain.engines.hf_sampling import SamplingProcessor, StopStringCriterion, own_defaults_only, seeded_rows
from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.engines.scopes import evaluation_mode, kept_mode
from aitrain.environment.seeds import SampleSeed
from aitrain.errors import RunFailed
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
    pad_to_multiple_of: int | None = None
    cache_implementation: str | None = None
    continuous_batching: ContinuousBatchingConfig | None = None
    """Generate with `generate_batch`, without padding; None: with `generate`."""
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
        policy, config = self.policy, self._config(max_tokens, sampling)
        prompts = [row.prompt_ids for row in rows]
        criterion = StopStringCriterion(self.end, rows)
        processor = SamplingProcessor(sampling, self.end, rows)
        can_seed = seeds and policy.continuous_batching is None
        seeded = partial(seeded_rows, rows=lambda _: seeds) if can_seed else nullcontext
        prepared = policy.unwrapped() if policy.unwrapped else nullcontext(policy.model)
        with prepared as model, torch.no_grad(), own_defaults_only(model), seeded(model):
            if policy.continuous_batching is not None:
                with kept_mode(model):
                    results = model.generate_batch(
                        prompts, config, continuous_batching_config=policy.continuous_batching, progress_bar=False
                    )
                failed = [result.error for result in results.values() if result.error is not None]
                if failed:  # it returns what was generated until then
                    raise RunFailed(f"Continuous batching failed: {failed[0]}")
                return _counted([Completion(result.generated_tokens) for result in results.values()])
            ids, mask = self._padded(prompts)
            generated = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=[processor] if sampling.needs_processor else [],
                stopping_criteria=[criterion] if self.end.stop_strings is not None else [],
                streamer=None if policy.on_tokens is None else _TokenStream(policy.on_tokens),
            )
        return _counted([Completion(answer) for answer in criterion.cut(generated[:, ids.shape[1] :].tolist())])

    def _config(self, max_tokens: int, sampling: Sampling) -> GenerationConfig:
        shape = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        does_sample = sampling.temperature > 0
        return GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=does_sample,
            pad_token_id=self.policy.tokenizer.pad_token_id,
            eos_token_id=list(self.end.eos_ids) or None,
            cache_implementation=self.policy.cache_implementation,
            disable_compile=True,
            **(shape if does_sample else {}),
        )

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, shape (rows, tokens)."""
        multiple = self.policy.pad_to_multiple_of or 1
        width = -(-max(map(len, prompts)) // multiple) * multiple
        pad, device = self.policy.tokenizer.pad_token_id, self.policy.device or self.policy.model.device
        ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _counted(completions: list[Completion]) -> list[Completion]:
    """The completions, with their tokens counted as progress."""
    activity.add_tokens(sum(len(completion.ids) for completion in completions))
    return completions


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
