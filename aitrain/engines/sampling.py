"""Sampling options in the form that each engine takes, and the distribution that they define.

From a token's logits to its probability, in vLLM's order, on every engine:

    1. below `min_new_tokens` the tokens that end an answer get -inf
    2. repetition penalty: over the tokens of the whole context; frequency and presence penalty: over the answer's own
    3. division by the temperature
    4. min_p: tokens below that share of the most likely one's probability are cut off
    5. top_k, then top_p over what top_k leaves; softmax over the tokens that are left

A stop string ends a completion of more than `min_new_tokens` tokens with the token that completes it. All of its tokens
stay in the completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from aitrain.options.train import TrainConfig
from aitrain.rollout.limits import StopStrings

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one run."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig) -> Sampling:
        """The sampling options of a configuration."""
        values = {field.name: getattr(config, f"rl_{field.name}") for field in fields(cls)}
        return cls(**{**values, "stop": tuple(config.rl_stop or ())})

    @property
    def greedy(self) -> Sampling:
        """The same penalties and stop strings with greedy decoding, in vLLM's notation."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0)

    @property
    def is_plain(self) -> bool:
        """Whether a token's probability is softmax(logits / temperature)."""
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return not (cuts or self.counts_tokens or self.min_new_tokens > 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether there are penalties, which need the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def stop_strings(self, tokenizer: Any) -> StopStrings | None:
        """The stop strings; None if there are none."""
        return StopStrings(tokenizer, self.stop, self.min_new_tokens) if self.stop else None

    def vllm_extras(self, eos_ids: Sequence[int], limit: int) -> dict[str, Any]:
        """The fields of vLLM's SamplingParams, and of its HTTP requests, beside temperature, top_k, top_p, min_p and
        repetition_penalty, for answers of at most `limit` tokens."""
        extras: dict[str, Any] = {
            "stop_token_ids": list(eos_ids),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": min(self.min_new_tokens, limit),  # vLLM refuses more than the limit
        }
        if self.stop:
            # special tokens count as their text, as in StopStrings
            extras |= {"stop": list(self.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
            extras["spaces_between_special_tokens"] = False
        return extras

    # -- the distribution. Logits are float32, shape (rows, vocabulary), and not changed in place.

    def penalized(
        self, logits: Tensor, ids: Tensor, is_context: Tensor, is_answer: Tensor, eos_ids: Sequence[int]
    ) -> Tensor:
        """Logits after `min_new_tokens` and the penalties. Of the token ids `ids`, in the shape of the other two or one
        row for all, `is_context` marks those of the context, and `is_answer` those of the answer, which is its end."""
        if self.min_new_tokens:
            masked = logits.clone()
            masked[:, list(eos_ids)] = -math.inf
            logits = torch.where((is_answer.sum(-1) < self.min_new_tokens)[:, None], masked, logits)
        if self.counts_tokens:
            in_context, in_answer = (
                torch.zeros_like(logits).scatter_add_(-1, ids.expand(marked.shape), marked.to(logits.dtype))
                for marked in (is_context, is_answer)
            )
            penalty = torch.where(logits > 0, 1 / self.repetition_penalty, self.repetition_penalty)
            logits = torch.where(in_context > 0, logits * penalty, logits)
            logits = logits - self.frequency_penalty * in_answer - self.presence_penalty * (in_answer > 0)
        return logits

    def cut_by_min_p(self, logits: Tensor) -> Tensor:
        """Logits before the temperature, -inf where `min_p` cuts off: p >= min_p * p_max, written in logits."""
        if self.min_p <= 0.0:
            return logits
        bound = logits.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
        return logits.masked_fill(logits < bound, -math.inf)

    def is_kept(self, scaled: Tensor) -> Tensor:
        """Mask of the tokens that top_k and top_p keep, given logits after penalties, temperature and min_p."""
        kept = scaled > -math.inf
        if 0 < self.top_k < scaled.shape[-1]:
            kept &= scaled >= scaled.topk(self.top_k, dim=-1).values[:, -1:]
        if self.top_p < 1.0:
            ordered, places = scaled.masked_fill(~kept, -math.inf).sort(dim=-1)  # the least likely first
            is_tail = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_tail[:, -1] = False
            kept &= ~torch.zeros_like(is_tail).scatter(-1, places, is_tail)
        return kept

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of sampled tokens, shape (rows,), given logits after `penalized`.

        A sampled token always counts as kept: at the edge of a cut, rounding may decide differently in the engine.
        """
        scaled = self.cut_by_min_p(logits) / self.temperature
        kept = self.is_kept(scaled).scatter(-1, tokens[:, None], True)
        scaled = (logits / self.temperature).masked_fill(~kept, -math.inf)
        return scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)
