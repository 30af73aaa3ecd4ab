"""transformers' `generate` with a seed for each row: a row's tokens depend neither on its neighbours nor on its place.

The random numbers of a token depend only on its row's seed and its position (Gumbel-max: the token with the highest
log-probability plus Gumbel noise is a sample of the distribution).

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    model._get_logits_processor(generation_config=...)  extended while this lasts: what it returns comes last, after
                                                        temperature and truncation, which `logits_processor=` does not
    GenerationMixin._sample                             draws with torch.multinomial from what the processors leave
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import LogitsProcessor
from transformers.generation import GenerationMode

from aitrain.environment.seeds import SampleSeed

Rows = Callable[[int], Sequence[SampleSeed | None]]
"""Given a number of rows, the seed of each; None: torch's global generator."""


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
        return made

    vars(policy)["_get_logits_processor"] = processors
    try:
        with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
            yield
    finally:
        del vars(policy)["_get_logits_processor"]


class RowSampler(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Samples a token for each row, and masks all others, so that `generate` takes it."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._step = rows, 0
        self._draws: Sequence[SampleSeed | None] = ()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores`: logits of shape (rows, vocabulary); returned unchanged if one is NaN, which `generate` refuses."""
        if self._step == 0:
            self._draws = self._rows(len(scores))
            self._generator = torch.Generator(scores.device)
        if scores.isnan().any():
            return scores
        drawn = (scores.float() + self._gumbel_noise(scores)).argmax(dim=-1, keepdim=True)
        self._step += 1
        return torch.full_like(scores, -math.inf).scatter_(1, drawn, 0.0)

    def _gumbel_noise(self, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, draw in zip(noise, self._draws, strict=True):
            seeded = None if draw is None else self._generator.manual_seed(draw.token_seed(self._step))
            row.exponential_(generator=seeded)
        return noise.log_().neg_()
