"""A loss, and a callback, as a user would name them."""

from __future__ import annotations

import torch
from transformers import TrainerCallback


def likelihood(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """REINFORCE."""
    return -logprobs * advantages


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts steps."""

    steps = 0

    def on_step_end(self, *_: object, **__: object) -> None:
        """One more."""
        self.steps += 1
