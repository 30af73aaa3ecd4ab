"""transformers' `generate` with a seed for each row: a row's tokens depend neither on its neighbours nor on its place.

The random numbers of a token depend only on its row's seed and its position (Gumbel-max: the token with the highest
log-probability plus Gumbel noise is a sample of the distribution).

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

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
