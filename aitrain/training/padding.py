"""Padding that changes nothing: a row's log-probabilities must not depend on how far the batch pads it.

TRL pads prompts on the left and hands the model no positions. Models that look positions up in a table (GPT-2, GPT-Neo)
or that carry a state from token to token then see the tokens at other places than generation did. Their rows are moved
to the left, so that all padding is on the right, behind everything that is scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LogProbs = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""`(ids, mask, count)`: log-probabilities of the last `count` tokens of each row; all but the count are of shape
(rows, columns)."""

TOKENS, PADDING, SCORED = 8, 24, 4
"""Of the row that a model is asked about: its tokens, the padding in front of it, and how many tokens are compared."""


@dataclass(frozen=True)
class LeftAligned:
    """Rows without padding on the left; as wide as the longest of them."""

    ids: torch.Tensor
    mask: torch.Tensor
    moved: torch.Tensor
    """Columns by which each row was moved, of shape (rows, 1)."""
    columns: int
    """Of the batch as it was."""

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor) -> LeftAligned:
        """Move the rows of a batch; its padding may be on either side, and nowhere else."""
        columns = ids.shape[1]
        moved = mask.long().argmax(dim=1, keepdim=True)
        width = max(2, int(mask.sum(dim=1).max()))
        source = torch.arange(width, device=ids.device) + moved
        inside = source.clamp(max=columns - 1)
        return cls(ids.gather(1, inside), mask.gather(1, inside) * (source < columns), moved, columns)

    def moved_back(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Values of all tokens but each row's first, as values of the last `count` columns of the batch as it was; 0
        for columns that were cut off, which only padding is."""
        source = torch.arange(self.columns - count, self.columns, device=values.device) - self.moved - 1
        last = values.shape[1] - 1
        return values.gather(1, source.clamp(0, last)).masked_fill(source > last, 0.0)


@torch.no_grad()
def depends_on_padding(log_probs: LogProbs, context: int | None, vocabulary: int, is_precise: bool) -> bool:
    """Whether padding on the left changes log-probabilities by more than rounding does, for a model in evaluation mode.

    `is_precise`: float32 throughout, where rounding makes up to 1e-5; bfloat16 makes up to about 0.1.
    """
    tokens = min(TOKENS, (context or 2 * TOKENS) // 2)
    padding = PADDING if context is None else min(PADDING, context - tokens)
    count = min(SCORED, tokens - 1)
    if count < 1 or padding < 1:
        return True
    row = torch.arange(1, tokens + 1)[None] % vocabulary
    padded = torch.nn.functional.pad(row, (padding, 0))
    mask = torch.nn.functional.pad(torch.ones_like(row), (padding, 0))
    difference = log_probs(padded, mask, count) - log_probs(row, torch.ones_like(row), count)
    return not float(difference.abs().mean()) <= (1e-3 if is_precise else 0.25)
