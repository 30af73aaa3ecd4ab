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
from itertools import compress
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
from aitrain.engines.shared_cache import (
    CACHE,
    KeptRow,
    PaddedRows,
    can_share,
    keep_rows,
    padded,
    with_kept_rows,
    with_prompts_once,
    with_running_rows,
)
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Leave
from aitrain.rollout.limits import EndOfTurn

TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
"""The settings of a model's generation_config that are kept."""

LEAVING = 0.25
"""Share of the rows of a batch that have ended when they leave it."""

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
    """Called with the newest token of each row in `generate` while it runs; what it raises ends the generation."""
    shares_prompts: bool = True
    """Whether prompts are computed once, for equal rows and for all turns of an episode, where the model can."""


class HFEngine(BatchingEngine):
    """Generates with a transformers model, in the mode (training or evaluation) that the model is in."""

    seeds_training = False  # it samples as TRL does
    keeps_cache = False
    """Whether the next batch continues what this one computed, as the weights stay the same."""

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
        self._kept: dict[int, KeptRow] = {}
        """What the rows of a batch continue from in its next round, by their numbers."""

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """As that of the base; the cache is kept from one of its rounds to the next, and longer with `keeps_cache`."""
        try:
            async with super().batch(episodes) as leave:
                yield leave
        finally:
            if not self.keeps_cache:
                self._kept = {}

    async def complete(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion for each row, without dropout; not for ranks that generate together."""
        with evaluation_mode(self.policy.model):
            return self.sample(rows, sampling, max_tokens)

    def sample(self, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        """One completion of at most `max_tokens` tokens for each row, with its own seed if all have one.

        Rows that have ended leave the batch once they are a quarter of it.
        """
        policy, prompts = self.policy, [row.prompt_ids for row in rows]
        kept = [self._kept.pop(row.number, None) for row in rows]
        self._kept = {}
        now, running, room = list(rows), list(range(len(rows))), max_tokens
        prepared = policy.unwrapped() if policy.unwrapped else nullcontext(policy.model)
        with prepared as model, torch.no_grad(), own_defaults_only(model):
            # ranks that generate together must make the same forward passes
            shares = policy.shares_prompts and not (self.is_shared or policy.cache_implementation) and can_share(model)
            batch = padded(prompts, policy.tokenizer.pad_token_id, policy.device or policy.model.device)
            if shares:
                batch = with_kept_rows(model, batch, prompts, kept) or with_prompts_once(model, batch)
            while running:
                live = [now[place] for place in running]
                output, new = self._generate(model, batch, live, sampling, room, shares)
                room -= output.sequences.shape[1] - batch.ids.shape[1]
                for place, ids in zip(running, new, strict=True):
                    now[place] = now[place].after(ids)
                goes_on = [room > 0 and not self.end.is_reached(now[place].begun_ids) for place in running]
                if shares:
                    ended = {
                        row.number: (place, batch.ids.shape[1] - len(row.prompt_ids), now[running[place]].prompt_ids)
                        for place, row in enumerate(live)
                        if row.number >= 0 and not goes_on[place]
                    }
                    self._kept |= keep_rows(model, output.get(CACHE), ended, is_last=not any(goes_on))
                if any(goes_on):
                    batch = with_running_rows(batch, output, list(compress(range(len(live)), goes_on)))
                running = list(compress(running, goes_on))
        answers = [row.prompt_ids[len(prompt) :] for row, prompt in zip(now, prompts, strict=True)]
        activity.add_tokens(sum(map(len, answers)))
        return list(map(Completion, answers))

    def _generate(
        self, model: Any, batch: PaddedRows, rows: list[BatchRow], sampling: Sampling, max_tokens: int, leaves: bool
    ) -> tuple[Any, list[list[int]]]:
        """The output of `model.generate`, and the new tokens of each row; with `leaves` it returns when LEAVING of the
        rows have ended."""
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
        criterion = EndOfRows(self.end, rows, policy.on_tokens, leaves)
        processor = SamplingProcessor(sampling, self.end, rows)
        seeds = [row.seed for row in rows if row.seed is not None]
        seeded = partial(seeded_rows, seed_of=seeds.__getitem__) if len(seeds) == len(rows) else nullcontext
        with seeded(model):
            output = model.generate(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                generation_config=config,
                logits_processor=[processor] if sampling.needs_processor else [],
                stopping_criteria=[criterion] if leaves or self.end.stop_strings or policy.on_tokens else [],
                **({} if batch.cache is None else {CACHE: batch.cache}),
            )
        return output, criterion.cut(output.sequences[:, batch.ids.shape[1] :].tolist())


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


class EndOfRows(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows of one generation whose newest token completes a stop string; all rows once LEAVING of them have
    ended, if `leaves`."""

    def __init__(
        self,
        end: EndOfTurn,
        rows: Sequence[BatchRow],
        on_tokens: Callable[[list[int]], None] | None = None,
        leaves: bool = False,
    ) -> None:
        self._end, self._rows, self._on_tokens, self._leaves = end, rows, on_tokens, leaves
        self._width = 0
        self._lengths: dict[int, int] = {}
        """Number of new tokens of each row that a stop string has ended."""
        self._ended = torch.tensor(False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Called after each token; True for each row that has ended."""
        self._width = self._width or input_ids.shape[1] - 1
        if self._end.stop_strings is not None or self._on_tokens is not None:
            self._read(input_ids[:, self._width :].tolist())
        newest = input_ids[:, -1]
        ended = torch.tensor([row in self._lengths for row in range(len(newest))], device=newest.device)
        ended |= torch.isin(newest, newest.new_tensor(self._end.eos_ids))
        self._ended = self._ended.to(newest.device) | ended
        return self._ended | (self._leaves & (self._ended.sum() >= LEAVING * len(newest)))

    def _read(self, generated: list[list[int]]) -> None:
        for row, ids in enumerate(generated):
            if row not in self._lengths and self._end.is_reached(self._rows[row].begun_ids + ids):
                self._lengths[row] = len(ids)
        if self._on_tokens is not None:
            self._on_tokens([ids[-1] for ids in generated])

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
