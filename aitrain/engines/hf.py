"""Generation by transformers: a batch at a time, padded on the left, drawn with torch's generator as TRL does.

What its `generate` lacks is added by a logits processor: vLLM's order of the sampling options, and a seed for each row;
stop strings by a criterion. With seeds, a row's tokens depend neither on its neighbours nor on its place: the random
numbers of a token depend only on its row's seed and its position (Gumbel-max: the token with the highest
log-probability plus Gumbel noise is a sample of the distribution).

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    model.generation_config                    fills in what the given configuration leaves unset; the innermost
                                               model's, where peft wraps it
    GenerationMixin._sample                    takes the argmax of what the processors leave if do_sample is False
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain.engines.batching import BatchingEngine
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import innermost, replaced
from aitrain.engines.shared_cache import (
    CACHE,
    AutocastCache,
    KeptRow,
    PaddedRows,
    cache_of_kept,
    cache_of_prompts,
    can_share,
    keep_rows,
    padded,
    with_running_rows,
)
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave

TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
"""The settings of a model's generation_config that are kept."""

LEAVING = 0.25
"""Share of the rows of a batch that have ended when they leave it."""


class HFEngine(BatchingEngine):
    """Generates with a transformers model, in the mode (training or evaluation) that the model is in."""

    shares_prompts = True
    """Whether prompts are computed once, for equal rows and for all turns of an episode, where the model can."""
    unwrapped: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None
    """Prepares a model that is wrapped or sharded for one generation; None: `model` generates as it is."""
    on_tokens: Callable[[list[int]], None] | None = None
    """Called with the newest token of each row in `generate` while it runs; what it raises ends the generation."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        end: EndOfTurn,
        context: int | None = None,
        shared_by: Accelerator | None = None,
    ) -> None:
        super().__init__(end, context, shared_by)
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self._kept: dict[int, KeptRow] = {}
        """What the rows of a batch continue from in its next round, by their indices; without one, as in a chat, those
        of the next request."""

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """As that of the base; the cache is kept from one of its rounds to the next."""
        try:
            async with super().batch(episodes) as leave:
                yield leave
        finally:
            self._kept = {}

    def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, with its own seed unless it is of a training.

        Rows that have ended leave the batch once they are a quarter of it.
        """
        prompts = [row.prompt_ids for row in rows]
        kept = [self._kept.pop(row.index, None) for row in rows]
        self._kept = {}
        now, running, room = list(rows), list(range(len(rows))), max_tokens
        prepared = nullcontext(self.model) if self.unwrapped is None else self.unwrapped()
        with prepared as model, torch.no_grad(), own_defaults_only(model):
            is_dynamic, cache = can_share(model), None
            # ranks that generate together must make the same forward passes
            shares = is_dynamic and self.shares_prompts and self.shared_by is None
            batch = padded(prompts, self.tokenizer.pad_token_id, self.model.device)
            if shares:
                cache = cache_of_kept(model, prompts, kept) or cache_of_prompts(model, batch)
            if is_dynamic:
                batch = replace(batch, cache=cache or AutocastCache(config=model.config))
            while running:
                live = [now[place] for place in running]
                output, grown = self._generate(model, batch, live, sampling, room, shares)
                room -= output.sequences.shape[1] - batch.ids.shape[1]
                for place, row in zip(running, grown, strict=True):
                    now[place] = row
                go_on = [
                    place for place, row in enumerate(grown) if room > 0 and not self.end.is_reached(row.begun_ids)
                ]
                if shares:
                    ended = {place: row for place, row in enumerate(grown) if row.index >= 0 and place not in go_on}
                    self._kept |= keep_rows(output.get(CACHE), batch.mask, ended, is_last=not go_on)
                if go_on:
                    batch = with_running_rows(batch, output, go_on)
                running = [running[place] for place in go_on]
        return [Completion(row.prompt_ids[len(prompt) :]) for row, prompt in zip(now, prompts, strict=True)]

    def _generate(
        self,
        model: Any,
        batch: PaddedRows,
        rows: list[GenerationRequest],
        sampling: Sampling,
        max_tokens: int,
        leaves: bool,
    ) -> tuple[Any, list[GenerationRequest]]:
        """The output of `model.generate` and the rows with their new tokens, when all have ended; with `leaves`, when
        LEAVING of them have."""
        as_trl = rows[0].decoding is Decoding.TRAINING  # samples with torch's generator
        seeds = [row.seed for row in rows] if sampling.temperature and not as_trl else []
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=sampling.temperature > 0 and not seeds,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=list(self.end.eos_ids) or None,
            disable_compile=True,
            return_dict_in_generate=True,
        )
        if config.do_sample:
            config.top_k = 0  # else 50
        criterion = EndOfRows(self.end, [row.begun_ids for row in rows], self.on_tokens, leaves)
        output = model.generate(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            generation_config=config,
            logits_processor=[SamplingProcessor(sampling, seeds)],
            stopping_criteria=[criterion],
            **({} if batch.cache is None else {CACHE: batch.cache}),
        )
        return output, [row.after(ids[row.begun :]) for row, ids in zip(rows, criterion.completions, strict=True)]


def own_defaults_only(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Context in which the model's generation_config has its special tokens only."""
    before = innermost(model).generation_config
    own = GenerationConfig(**{name: getattr(before, name) for name in TOKENS})
    return replaced(innermost(model), {"generation_config": own})


@dataclass(eq=False)
class SamplingProcessor(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Makes of a model's logits those that the options of `Sampling` define, in one generation; with `seeds`, those
    whose highest one is of a sampled token."""

    sampling: Sampling
    seeds: Sequence[SampleSeed]
    width: int = 0
    """Tokens of the padded prompts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids`: (rows, tokens so far), padded on the left; `scores`: (rows, vocabulary), float32."""
        sampling, self.width = self.sampling, self.width or input_ids.shape[1]
        if not sampling.temperature:
            return scores
        scores = sampling.truncated(scores / sampling.temperature)
        step = input_ids.shape[1] - self.width
        return with_noise(scores, [seed.token_seed(step) for seed in self.seeds]) if self.seeds else scores


@dataclass(eq=False)
class EndOfRows(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows of one generation, by stop strings too; with `leaves`, all rows once LEAVING of them have ended."""

    end: EndOfTurn
    completions: list[list[int]]
    """The tokens of each row's completion up to its end."""
    on_tokens: Callable[[list[int]], None] | None
    leaves: bool
    ended: set[int] = field(default_factory=set, init=False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Called after each token; True for each row that has ended."""
        newest = input_ids[:, -1].tolist()
        for row, (ids, token) in enumerate(zip(self.completions, newest, strict=True)):
            if row not in self.ended:
                ids.append(token)
                if self.end.is_reached(ids):
                    self.ended.add(row)
        if self.on_tokens is not None:
            self.on_tokens(newest)
        is_over = self.leaves and len(self.ended) >= LEAVING * len(newest)
        return torch.tensor([is_over or row in self.ended for row in range(len(newest))], device=input_ids.device)


def with_noise(scores: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Logits, of shape (rows, vocabulary), with noise by a seed for each row: the highest one is of a sampled token.

    Raises:
        RuntimeError: one is NaN, or a row has no token left.
    """
    noise, generator = torch.empty_like(scores, dtype=torch.float32), torch.Generator(scores.device)
    for values, seed in zip(noise, seeds, strict=True):
        values.exponential_(generator=generator.manual_seed(seed))
    noisy = noise.log_().neg_().add_(scores)
    if not noisy.amax(dim=-1).isfinite().all():
        torch.multinomial(scores.softmax(dim=-1), num_samples=1)  # raises, as without seeds
    return noisy
