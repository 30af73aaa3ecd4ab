"""A policy whose answers are written down."""

from __future__ import annotations

from collections.abc import Callable

from aitrain.engines.batching import BatchRow
from aitrain.engines.hf import HFEngine
from aitrain.engines.sampling import Sampling
from aitrain.rollout.engine import Completion

Sample = Callable[[HFEngine, list[BatchRow], Sampling, int], list[Completion]]


def scripted(answer: Callable[[int, str], str]) -> Sample:
    """In the place of `HFEngine.sample`: what `answer` makes of each row's position in the batch and its text."""

    def sample(self: HFEngine, rows: list[BatchRow], sampling: Sampling, max_tokens: int) -> list[Completion]:
        tokenizer = self.policy.tokenizer
        texts = [answer(position, tokenizer.decode(row.prompt_ids)) for position, row in enumerate(rows)]
        return [Completion(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    return sample
