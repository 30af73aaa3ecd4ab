"""What transformers' `generate` lacks: vLLM's order of the sampling options, stop strings, and a seed for each row.

With seeds, a row's tokens depend neither on its neighbours nor on its place: the random numbers of a token depend only
on its row's seed and its position (Gumbel-max: the token with the highest log-probability plus Gumbel noise is a sample
of the distribution).

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation import GenerationMode

from aitrain.engines.batching import BatchRow
from aitrain.engines.sampling import Sampling
from aitrain.environment.seeds import SampleSeed
from aitrain.rollout.limits import EndOfTurn

TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
"""The settings of a model's generation_config that are kept."""

Rows = Callable[[int], Sequence[SampleSeed | None]]
"""Given a number of rows, the seed of each; None: torch's global generator."""


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
        self._width = self._counted = 0
        """Tokens of the padded prompts, and of those that were counted."""
        self._seen = self._counts = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids`: (rows, tokens so far), padded on the left; `scores`: (rows, vocabulary), float32."""
        sampling = self._sampling
        if not self._width:
            self._width = self._counted = input_ids.shape[1]
            if sampling.counts_tokens:
                self._seen, self._counts = token_counts([(row.prompt_ids, row.begun_ids) for row in self._rows], scores)
        if sampling.min_new_tokens:
            new = input_ids.shape[1] - self._width
            lengths = torch.tensor([row.begun + new for row in self._rows], device=scores.device)
            scores = sampling.without_ends(scores, lengths, self._end.eos_ids)
        if sampling.counts_tokens:  # those of rows that have ended are not used
            newest = input_ids[:, self._counted :]
            self._counted = input_ids.shape[1]
            self._seen.scatter_(-1, newest, True)
            self._counts.scatter_add_(-1, newest, torch.ones_like(newest, dtype=self._counts.dtype))
            scores = sampling.penalized(scores, self._seen, self._counts)
        return sampling.cut_by_min_p(scores)


def token_counts(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each pair of context (completion included) and completion: the tokens of the context (bool), and the count of
    each token in the completion; shape (pairs, vocabulary), like `like`."""
    seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    counts = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for row, (context, answer) in enumerate(pairs):
        seen[row, torch.tensor(context, dtype=torch.long, device=like.device)] = True
        tokens = torch.tensor(answer, dtype=torch.long, device=like.device)
        counts[row].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))
    return seen, counts


class StopStringCriterion(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows of one generation whose newest token completes a stop string."""

    def __init__(self, end: EndOfTurn, rows: Sequence[BatchRow]) -> None:
        self._end, self._rows = end, rows
        self._width = 0
        self._live = set(range(len(rows)))
        self._lengths: dict[int, int] = {}
        """Number of new tokens of each row that a stop string has ended."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Called after each token; True for each row that a stop string has ended."""
        self._width = self._width or input_ids.shape[1] - 1
        generated, stops = input_ids[:, self._width :].tolist(), self._end.stop_strings
        for row in sorted(self._live):
            if generated[row][-1] in self._end.eos_ids:
                self._live.discard(row)
            elif stops is not None and stops.ends(self._rows[row].begun_ids + generated[row]):
                self._live.discard(row)
                self._lengths[row] = len(generated[row])
        return torch.tensor([row in self._lengths for row in range(len(input_ids))], device=input_ids.device)

    def cut(self, generated: list[list[int]]) -> list[list[int]]:
        """The new tokens of each row, without the padding behind an eos token or a stop string."""
        answers = [ids[: self._lengths.get(row, len(ids))] for row, ids in enumerate(generated)]
        ends = [[place for place, token in enumerate(ids) if token in self._end.eos_ids] for ids in answers]
        return [ids[: end[0] + 1] if end else ids for ids, end in zip(answers, ends, strict=True)]


@contextmanager
def seeded_rows(model: Any, rows: Rows) -> Iterator[None]:
    """Context in which `model.generate` samples each row with its own seed; torch's generators are restored afterwards.

    Greedy decoding and beam search are unchanged.
    """
    policy = model.get_base_model() if isinstance(model, PeftModel) else model
    make = policy._get_logits_processor

    def processors(*arguments: Any, **options: Any) -> Any:
        made, config = make(*arguments, **options), options["generation_config"]
        if config.get_generation_mode() == GenerationMode.SAMPLE:
            made.append(RowSampler(rows))
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

    def __init__(self, rows: Rows) -> None:
        self._rows, self._step = rows, 0
        self._draws: Sequence[SampleSeed | None] = ()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores`: logits of shape (rows, vocabulary).

        Raises:
            RuntimeError: one is NaN, or a row has no token left.
        """
        if self._step == 0:
            self._draws = self._rows(len(scores))
            self._generator = torch.Generator(scores.device)
        noisy = self._gumbel_noise(scores).add_(scores)
        if not noisy.amax(dim=-1).isfinite().all():
            torch.multinomial(scores.softmax(dim=-1), num_samples=1)  # raises, as without seeds
        self._step += 1
        return noisy

    def _gumbel_noise(self, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, draw in zip(noise, self._draws, strict=True):
            seeded = None if draw is None else self._generator.manual_seed(draw.token_seed(self._step))
            row.exponential_(generator=seeded)
        return noise.log_().neg_()
