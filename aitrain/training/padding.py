"""Moves padded rows to one side, so that a forward pass has less padding, or none in front of a row.

For models whose log-probabilities depend on padding in front of a row: TRL pads prompts on the left and passes no
position ids. Models with learned positions (GPT-2, GPT-Neo) or a recurrent state then see each token at another
position than during generation. Their rows are left-aligned, so that all padding comes after the scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LogProbs = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""`(ids, mask, count)` to the log-probabilities of the last `count` tokens of each row; `ids` and `mask` have shape
(rows, columns)."""

TOKENS, PADDING, SCORED = 8, 24, 4
"""Length of the test row, padding in front of it, and number of tokens whose log-probabilities are compared."""


@dataclass(frozen=True)
class LeftAligned:
    """Rows without padding on the left, as wide as the longest row."""

    ids: torch.Tensor
    mask: torch.Tensor
    moved: torch.Tensor
    """Columns by which each row was shifted, shape (rows, 1)."""
    columns: int
    """Width of the original batch."""

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor) -> LeftAligned:
        """Left-align the rows of a batch, which may have padding on both sides but not between tokens."""
        columns = ids.shape[1]
        moved = mask.long().argmax(dim=1, keepdim=True)
        width = max(2, int(mask.sum(dim=1).max()))
        source = torch.arange(width, device=ids.device) + moved
        inside = source.clamp(max=columns - 1)
        return cls(ids.gather(1, inside), mask.gather(1, inside) * (source < columns), moved, columns)

    def moved_back(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Values for the last `count` columns of the original batch, given those of all tokens but each row's first.

        Columns that were cut off, which hold padding only, get 0.
        """
        source = torch.arange(self.columns - count, self.columns, device=values.device) - self.moved - 1
        last = values.shape[1] - 1
        return values.gather(1, source.clamp(0, last)).masked_fill(source > last, 0.0)


@dataclass(frozen=True)
class RightAligned:
    """Rows that all end in the last column, as wide as the longest row: where the prompts of a pass differ in length,
    that is less than the longest prompt and the longest completion together."""

    ids: torch.Tensor
    mask: torch.Tensor
    moved: torch.Tensor
    """Columns by which each row was shifted, shape (rows, 1)."""

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor) -> RightAligned:
        """Right-align the rows of a batch, which may have padding on both sides but not between tokens."""
        columns, lengths = ids.shape[1], mask.long().sum(dim=1, keepdim=True)
        moved = columns - mask.long().argmax(dim=1, keepdim=True) - lengths
        width = int(lengths.max())
        source = torch.arange(columns - width, columns, device=ids.device) - moved
        inside = source.clamp(min=0)
        return cls(ids.gather(1, inside), mask.gather(1, inside) * (source >= 0), moved)

    def moved_back(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the last columns as they were before; columns that were cut off, which hold padding, get 0."""
        source = torch.arange(values.shape[1], device=values.device) + self.moved
        last = values.shape[1] - 1
        return values.gather(1, source.clamp(max=last)).masked_fill(source > last, 0.0)


@torch.no_grad()
def depends_on_padding(log_probs: LogProbs, context: int | None, vocabulary: int, is_precise: bool) -> bool:
    """Whether left padding changes log-probabilities by more than rounding; the model must be in evaluation mode.

    `is_precise`: all float32, where rounding causes up to 1e-5; bfloat16 causes up to about 0.1.
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
