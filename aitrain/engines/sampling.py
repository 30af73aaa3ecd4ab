"""Sampling options in the form that each engine takes, and the distribution that they define.

From a token's logits to its probability, in vLLM's order, on every engine:

    1. division by the temperature
    2. top_k, then top_p over what top_k leaves; softmax over the tokens that are left

A stop string ends a completion with the token that completes it. All of its tokens stay in the completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from aitrain.options.train import TrainConfig

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one run."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig) -> Sampling:
        """The sampling options of a configuration."""
        return cls(config.rl_temperature, config.rl_top_k, config.rl_top_p, tuple(config.rl_stop or ()))

    @property
    def greedy(self) -> Sampling:
        """The same stop strings with greedy decoding, in vLLM's notation."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0)

    @property
    def is_plain(self) -> bool:
        """Whether a token's probability is softmax(logits / temperature)."""
        return self.top_k == 0 and self.top_p == 1.0

    def as_vllm(self, eos_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Fields of vLLM's SamplingParams, and of its HTTP requests: all that a model's generation_config.json would
        set otherwise."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": max_tokens,
            "stop_token_ids": list(eos_ids),
        }
        if self.stop:
            # special tokens count as their text, as in EndOfTurn
            fields |= {"stop": list(self.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
            fields["spaces_between_special_tokens"] = False
        return fields

    # -- the distribution. Logits are float32, shape (rows, vocabulary), and not changed in place.

    def truncated(self, scaled: Tensor) -> Tensor:
        """Logits after the temperature, with -inf for tokens that top_k and top_p leave out."""
        if self.top_k:
            scaled = TopKLogitsWarper(self.top_k)(None, scaled)
        if self.top_p < 1.0:
            scaled = TopPLogitsWarper(self.top_p)(None, scaled)
        return scaled

    def log_kept_share(self, scaled: Tensor, tokens: Tensor) -> Tensor:
        """Log of the probability of all tokens that are kept, shape (rows,), given logits after the temperature.

        A sampled token always counts as kept: at the edge of a cut, rounding may decide differently in the engine.
        """
        sampled = scaled.gather(-1, tokens[:, None])
        return self.truncated(scaled).scatter(-1, tokens[:, None], sampled).logsumexp(-1) - scaled.logsumexp(-1)
