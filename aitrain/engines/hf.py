"""Generation by transformers: a batch at a time, padded on the left, drawn with torch's generator as TRL does.

What its `generate` lacks is added: vLLM's order of the sampling options, stop strings, and a seed for each row. With
seeds, a row's tokens depend neither on its neighbours nor on its place: the random numbers of a token depend only on
its row's seed and its position (Gumbel-max: the token with the highest log-probability plus Gumbel noise is a sample of
the distribution).

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    GenerationMixin.generate(logits_processor=, stopping_criteria=)    the first come before temperature, top_k, top_p
    model.generation_config                    fills in what the given configuration leaves unset; the innermost
                                               model's, where peft wraps it
    model._get_logits_processor(generation_config=...)  extended while this lasts: what it returns comes last, after
                                                        temperature and truncation, which `logits_processor=` does not
    GenerationMixin._sample                             takes the argmax of what the processors leave if do_sample is
                                                        False, which spares it a draw that would be thrown away
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation import GenerationMode
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from aitrain import activity
from aitrain.engines.batching import BatchingEngine, BatchRow, Largest
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.engines.shared_cache import CACHE, CachedRows, continued, kept, padded, with_prompts_once
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Leave
from aitrain.rollout.limits import EndOfTurn

TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
"""The settings of a model's generation_config that are kept."""

SeedOf = Callable[[int], SampleSeed]
"""The seed of a row."""


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
    shares_prompts: bool = True
    """Whether prompts are computed once, for equal rows and for all turns of an episode, where the model can."""


class HFEngine(BatchingEngine):
    """Generates with a transformers model, in the mode (training or evaluation) that the model is in."""

    seeds_training = False  # it samples as TRL does

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
        self._kept: CachedRows | None = None

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """As that of the base; the cache is kept from one of its rounds to the next."""
        try:
            async with super().batch(episodes) as leave:
                yield leave
        finally:
            self._kept = None

    async def complete(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion for each row, without dropout; not for ranks that generate together."""
        with evaluation_mode(self.policy.model):
            return self.sample(rows, sampling, max_tokens)

    def sample(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, with its own seed if all have one."""
        policy = self.policy
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=sampling.temperature > 0,
            pad_token_id=policy.tokenizer.pad_token_id,
            eos_token_id=list(self.end.eos_ids) or None,
            cache_implementation=policy.cache_implementation,
            disable_compile=True,
            return_dict_in_generate=True,
        )
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = sampling.temperature, sampling.top_k, sampling.top_p
        prompts, pad = [row.prompt_ids for row in rows], policy.tokenizer.pad_token_id
        numbers, before = [row.number for row in rows], self._kept
        self._kept = None
        criterion = StopStringCriterion(self.end, rows, policy.on_tokens)
        processor = SamplingProcessor(sampling, self.end, rows)
        prepared = policy.unwrapped() if policy.unwrapped else nullcontext(policy.model)
        seeds = [row.seed for row in rows if row.seed is not None]
        seeded = partial(seeded_rows, seed_of=seeds.__getitem__) if len(seeds) == len(rows) else nullcontext
        with prepared as model, torch.no_grad(), own_defaults_only(model), seeded(model):
            # ranks that generate together must make the same forward passes
            shares = policy.shares_prompts and not (self.is_shared or policy.cache_implementation or model._is_stateful)
            begun = continued(before, numbers, prompts, pad) if before is not None else None
            if begun is None:
                begun = padded(prompts, pad, policy.device or policy.model.device)
                begun = with_prompts_once(model, begun) if shares else begun
            output = model.generate(
                input_ids=begun.ids,
                attention_mask=begun.mask,
                generation_config=config,
                logits_processor=[processor] if sampling.needs_processor else [],
                stopping_criteria=[criterion] if self.end.stop_strings or policy.on_tokens else [],
                **({} if begun.cache is None else {CACHE: begun.cache}),
            )
        answers = criterion.cut(output.sequences[:, begun.ids.shape[1] :].tolist())
        # processors count columns from the right, where a continued row has holes
        if shares and not sampling.needs_processor and min(numbers) >= 0:
            self._kept = kept(begun, numbers, prompts, answers, output)
        activity.add_tokens(sum(map(len, answers)))
        return list(map(Completion, answers))


@contextmanager
def own_defaults_only(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's generation_config has its special tokens only."""
    innermost = model.get_base_model() if isinstance(model, PeftModel) else model
    before = innermost.generation_config
    innermost.generation_config = GenerationConfig(**{name: getattr(before, name) for name in TOKENS})
    try:
        yield
    finally:
        innermost.generation_config = before


class SamplingProcessor(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Applies those options of `Sampling` that come before the temperature, in one generation.

    transformers' own repetition penalty also counts padding, its own min_p comes after top_p, and it has no presence
    and frequency penalties.
    """

    def __init__(self, sampling: Sampling, end: EndOfTurn, rows: Sequence[BatchRow]) -> None:
        self._sampling, self._end, self._rows = sampling, end, rows
        self._width = 0
        """Tokens of the padded prompts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids`: (rows, tokens so far), padded on the left; `scores`: (rows, vocabulary), float32."""
        self._width = self._width or input_ids.shape[1]
        begins = torch.tensor([[len(row.prompt_ids), row.begun] for row in self._rows], device=scores.device)
        places = torch.arange(input_ids.shape[1], device=scores.device)
        is_context, is_answer = (places >= self._width - begin[:, None] for begin in begins.T)
        # those of rows that have ended are not used
        scores = self._sampling.penalized(scores, input_ids, is_context, is_answer, self._end.eos_ids)
        return self._sampling.cut_by_min_p(scores)


class StopStringCriterion(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows of one generation whose newest token completes a stop string."""

    def __init__(
        self, end: EndOfTurn, rows: Sequence[BatchRow], on_tokens: Callable[[list[int]], None] | None = None
    ) -> None:
        self._end, self._rows, self._on_tokens = end, rows, on_tokens
        self._width = 0
        self._lengths: dict[int, int] = {}
        """Number of new tokens of each row that has ended."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Called after each token; True for each row that has ended."""
        self._width = self._width or input_ids.shape[1] - 1
        generated = input_ids[:, self._width :].tolist()
        for row, ids in enumerate(generated):
            if row not in self._lengths and self._end.is_reached(self._rows[row].begun_ids + ids):
                self._lengths[row] = len(ids)
        if self._on_tokens is not None:
            self._on_tokens([ids[-1] for ids in generated])
        return torch.tensor([row in self._lengths for row in range(len(input_ids))], device=input_ids.device)

    def cut(self, generated: list[list[int]]) -> list[list[int]]:
        """The new tokens of each row, without the padding behind an eos token or a stop string."""
        answers = [ids[: self._lengths.get(row, len(ids))] for row, ids in enumerate(generated)]
        ends = [[place for place, token in enumerate(ids) if token in self._end.eos_ids] for ids in answers]
        return [ids[: end[0] + 1] if end else ids for ids, end in zip(answers, ends, strict=True)]


@contextmanager
def seeded_rows(model: Any, seed_of: SeedOf) -> Iterator[None]:
    """Context in which `model.generate` samples each row with its own seed; torch's generators are restored afterwards.

    Greedy decoding and beam search are unchanged.
    """
    policy = model.get_base_model() if isinstance(model, PeftModel) else model
    make = policy._get_logits_processor

    def processors(*arguments: Any, **options: Any) -> Any:
        made, config = make(*arguments, **options), options["generation_config"]
        if config.get_generation_mode() == GenerationMode.SAMPLE:
            made.append(RowSampler(seed_of))
            config.do_sample = False  # of generate's own copy
        return made

    vars(policy)["_get_logits_processor"] = processors
    try:
        with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
            yield
    finally:
        del vars(policy)["_get_logits_processor"]


class RowSampler(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Adds noise to the scores, so that the highest one is that of a sampled token."""

    def __init__(self, seed_of: SeedOf) -> None:
        self._seed_of, self._step = seed_of, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores`: logits of shape (rows, vocabulary).

        Raises:
            RuntimeError: one is NaN, or a row has no token left.
        """
        noise, generator = torch.empty_like(scores, dtype=torch.float32), torch.Generator(scores.device)
        for row, values in enumerate(noise):
            values.exponential_(generator=generator.manual_seed(self._seed_of(row).token_seed(self._step)))
        noisy = noise.log_().neg_().add_(scores)
        if not noisy.amax(dim=-1).isfinite().all():
            torch.multinomial(scores.softmax(dim=-1), num_samples=1)  # raises, as without seeds
        self._step += 1
        return noisy
