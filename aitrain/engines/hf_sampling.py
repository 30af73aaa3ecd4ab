"""The run's sampling options for transformers' `generate`, in place of the model's generation_config.

Inside API of transformers 5.17 that it uses (tests/training/test_upstream.py):

    GenerationMixin.generate(logits_processor=, stopping_criteria=)    the first come before temperature, top_k, top_p
    model.generation_config                    fills in what the given configuration leaves unset; the innermost
                                               model's, where peft wraps it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from aitrain.engines.batching import BatchRow
from aitrain.engines.sampling import Sampling
from aitrain.rollout.limits import EndOfTurn

TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
"""The settings of a model's generation_config that are kept."""


@contextmanager
def own_defaults_only(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's generation_config has its special tokens only."""
    innermost = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = innermost.generation_config
    innermost.generation_config = GenerationConfig(**{name: getattr(before, name) for name in TOKENS})
    try:
        yield
    finally:
        innermost.generation_config = before


@dataclass
class HFSampling:
    """Logits processor and stopping criterion of transformers' `generate` for one batch of prompts."""

    sampling: Sampling
    end: EndOfTurn
    rows: Sequence[BatchRow]
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of new tokens of each row that a stop string has ended."""

    def arguments(self) -> dict[str, object]:
        """Arguments of `generate`, beside the generation configuration."""
        given: dict[str, object] = {}
        if self.sampling.needs_processor:
            given["logits_processor"] = [_Processor(self)]
        if self.end.stop_strings is not None:
            given["stopping_criteria"] = [_Criterion(self)]
        return given

    def cut(self, generated: list[list[int]]) -> list[list[int]]:
        """The new tokens of each row, without the padding behind an eos token or a stop string."""
        answers = [ids[: self.lengths.get(row, len(ids))] for row, ids in enumerate(generated)]
        ends = [[place for place, token in enumerate(ids) if token in self.end.eos_ids] for ids in answers]
        return [ids[: end[0] + 1] if end else ids for ids, end in zip(answers, ends, strict=True)]

    def answer(self, row: int, generated: list[int]) -> list[int]:
        """A row's whole completion, including the tokens that earlier rounds generated."""
        prompt = self.rows[row].prompt_ids
        return prompt[len(prompt) - self.rows[row].begun :] + generated


class _Processor(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Applies those options of `Sampling` that come before the temperature.

    transformers' own repetition penalty also counts padding, its own min_p comes after top_p, and it has no presence
    and frequency penalties.
    """

    def __init__(self, batch: HFSampling) -> None:
        self._batch = batch
        self._width = 0
        """Tokens of the padded prompts."""
        self._counted = 0
        self._seen = self._counts = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids`: (rows, tokens so far), padded on the left; `scores`: (rows, vocabulary), float32."""
        sampling, batch = self._batch.sampling, self._batch
        if not self._width:
            self._begin(input_ids, scores)
        generated = input_ids[:, self._width :]
        if sampling.min_new_tokens:
            lengths = torch.tensor([row.begun for row in batch.rows], device=scores.device) + generated.shape[1]
            scores = sampling.without_ends(scores, lengths, batch.end.eos_ids)
        if sampling.counts_tokens:
            self._count(generated[:, self._counted :])
            scores = sampling.penalized(scores, self._seen, self._counts)
        return sampling.cut_by_min_p(scores)

    def _begin(self, input_ids: torch.Tensor, scores: torch.Tensor) -> None:
        self._width = input_ids.shape[1]
        if self._batch.sampling.counts_tokens:
            pairs = [(row.prompt_ids, self._batch.answer(place, [])) for place, row in enumerate(self._batch.rows)]
            self._seen, self._counts = token_counts(pairs, scores)

    def _count(self, new: torch.Tensor) -> None:
        """Count the newest tokens; counts of rows that have ended are not used."""
        self._counted += new.shape[1]
        self._seen.scatter_(-1, new, True)
        self._counts.scatter_add_(-1, new, torch.ones_like(new, dtype=self._counts.dtype))


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


class _Criterion(StoppingCriteria):  # type: ignore[misc]
    """Ends the rows whose newest token completes a stop string."""

    def __init__(self, batch: HFSampling) -> None:
        self._batch = batch
        self._width = 0
        self._live = set(range(len(batch.rows)))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Called after each token; True for each row that a stop string has ended."""
        self._width = self._width or input_ids.shape[1] - 1
        batch, generated = self._batch, input_ids[:, self._width :].tolist()
        stops = batch.end.stop_strings
        assert stops is not None
        for row in sorted(self._live):
            if generated[row][-1] in batch.end.eos_ids:
                self._live.discard(row)
            elif stops.ends(batch.answer(row, generated[row])):
                self._live.discard(row)
                batch.lengths[row] = len(generated[row])
        return torch.tensor([row in batch.lengths for row in range(len(input_ids))], device=input_ids.device)
