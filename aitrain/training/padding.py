"""Moves padded rows to one side, so that a forward pass has less padding, or none in front of a row.

Left-aligned rows are for models whose log-probabilities depend on padding in front of a row: TRL pads prompts on the
left and passes no position ids. Models with learned positions (GPT-2, GPT-Neo) or a recurrent state then see each token
at another position than during generation. Right-aligned rows are narrower where the prompts of a pass differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS, TOKENS, PADDING, SCORED = 4, 8, 128, 4
"""Test rows, their length, padding in front of them, and number of tokens whose log-probabilities are compared."""
SHIFTED = 0.1
"""Change of log-probabilities, as a share of their spread, above which positions count padding. Rounding to bfloat16
changes those of SmolLM2 by 0.02, a table of positions those of GPT-2 by 0.6 or more."""


@dataclass(frozen=True)
class AlignedRows:
    """Rows that all begin in the first column or all end in the last one, as wide as the longest row."""

    ids: torch.Tensor
    mask: torch.Tensor
    offset: torch.Tensor
    """What is added to a column to have the one in which the token was before, shape (rows, 1)."""
    columns: int
    """Width of the original batch."""

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, to_left: bool) -> AlignedRows:
        """Align the rows of a batch, which may have padding on both sides but not between tokens."""
        columns, lengths = ids.shape[1], mask.long().sum(dim=1, keepdim=True)
        width = max(2, int(lengths.max()))
        offset = mask.long().argmax(dim=1, keepdim=True)
        if not to_left:
            offset = offset + lengths - width
        source = torch.arange(width, device=ids.device) + offset
        inside = source.clamp(0, columns - 1)
        return cls(ids.gather(1, inside), mask.gather(1, inside) * (source == inside), offset, columns)

    def moved_back(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Values for the last `count` columns of the original batch, given those of the last columns of this one.

        Columns that were cut off, which hold padding only, get 0.
        """
        first = self.ids.shape[1] - values.shape[1]
        source = torch.arange(self.columns - count, self.columns, device=values.device) - self.offset - first
        inside = source.clamp(0, values.shape[1] - 1)
        return values.gather(1, inside).masked_fill(source != inside, 0.0)


def depends_on_padding(
    compute: Callable[..., tuple[torch.Tensor, object, object]],
    device: torch.device,
    context: int | None,
    vocabulary: int,
    is_precise: bool,
) -> bool:
    """Whether left padding changes log-probabilities by more than rounding; the model must be in evaluation mode.

    The rows are random tokens from the middle of the vocabulary, as special tokens, which are at its ends, cause large
    rounding errors. The median tells rounding, which is large for a few tokens, from other positions.

    `compute`: `(ids, mask, count)` to the log-probabilities of the last `count` tokens of each row.
    `is_precise`: all float32, where rounding causes up to 1e-5.
    """
    tokens = min(TOKENS, (context or 2 * TOKENS) // 2)
    padding = PADDING if context is None else min(PADDING, context - tokens)
    count = min(SCORED, tokens - 1)
    if count < 1 or padding < 1:
        return True
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocabulary // 4, vocabulary - vocabulary // 4, (ROWS, tokens), generator=generator).to(device)
    mask = torch.ones_like(rows)
    plain, padded = (
        compute(*(torch.nn.functional.pad(values, (before, 0)) for values in (rows, mask)), count)[0]
        for before in (0, padding)
    )
    change = (padded - plain).abs().median() / plain.std().clamp(min=1e-12)
    return not float(change) <= (1e-3 if is_precise else SHIFTED)
