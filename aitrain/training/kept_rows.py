"""Leaves rows out of the loss: unscored episodes, and truncated ones that are masked.

TRL gives such a row a zero advantage, but still counts it in the mean over the B rows of a micro-batch, and adds its KL
term and entropy bonus. Here an optimizer step equals that of a batch with the kept rows only, for every loss type. Let
K_m be the kept rows in a micro-batch of this process, and K those of the whole optimizer step over all P processes,
whose gradients DDP averages:

* masks of the other rows are zero, so that they contribute nothing to any sum;
* a mean over B rows becomes one over K_m: terms averaged by rows are linear in advantages and beta, and both are
  multiplied by B / K_m;
* a micro-batch is weighted by its kept rows: TRL divides by the number of micro-batches, here by K / (K_m P);
* losses averaged over all tokens are divided by the number of tokens of K kept rows of this generation batch;
* metrics of the loss, which TRL averages over the micro-batches of a step, are weighted by their tokens of kept rows;
  those that are means over B rows, where the others count as 0, are multiplied by B M P / K, with M micro-batches.

If every row is kept, all of these equal TRL's numbers, and nothing is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

MicroBatch: TypeAlias = dict[str, torch.Tensor]
"""Inputs of TRL's loss; tensors have shape (B,), (B, tokens) or ()."""
Pieces: TypeAlias = list[MicroBatch]
"""A generation batch: the micro-batches of this process, as TRL stores them."""

AVERAGED_BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")

KEPT = "kept"
"""Key of a micro-batch: which rows are in the loss, shape (B,)."""
KEPT_EVERYWHERE = "kept_everywhere"
"""Key of a micro-batch: number of rows in the loss over all processes."""
KEPT_TOKENS = "kept_tokens"
"""Key of a micro-batch: number of tokens of its kept rows over all processes."""


@dataclass(frozen=True)
class StepWeights:
    """Weights of a step's micro-batches in metrics of the loss."""

    tokens: list[float]
    """In means over the tokens of kept rows."""
    rows: float
    """In means over all rows in which the others count as 0; the same for each micro-batch."""


@dataclass
class KeptRows:
    """Counts kept rows over the micro-batches of an optimizer step."""

    processes: int
    total: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over all processes."""
    done: list[int] = field(default_factory=list)
    """Kept rows of each micro-batch of the step so far, over all processes."""
    tokens: list[int] = field(default_factory=list)
    """Their tokens."""
    divisor: float = 0.0
    """Kept rows of the whole step, estimated from the micro-batches known so far."""
    has_none: bool = False
    """Whether the step that just ended had no kept row."""

    def begin_window(self, pieces: Pieces) -> None:
        """Mask the rows that are not kept in a new generation batch. Every process must call this."""
        kept = [int(piece[KEPT].sum()) for piece in pieces]
        own_tokens = [int((_loss_mask(piece) * piece[KEPT].unsqueeze(1)).sum()) for piece in pieces]
        counts = self.total(torch.tensor([*kept, *own_tokens], device=pieces[0][KEPT].device)).tolist()
        everywhere, tokens_of = counts[: len(pieces)], counts[len(pieces) :]
        for piece, count in zip(pieces, tokens_of, strict=True):
            piece[KEPT_TOKENS] = torch.tensor(count, device=piece[KEPT].device)
        if sum(everywhere) == sum(map(self.rows_of, pieces)):
            return
        tokens = sum(tokens_of)
        for piece, own, count in zip(pieces, kept, everywhere, strict=True):
            piece["tool_mask"] = piece["tool_mask"] * piece[KEPT].unsqueeze(1)
            piece[KEPT_EVERYWHERE] = torch.tensor(count, device=piece[KEPT].device)
            # TRL divides this by the processes and by the pieces, and multiplies it by our K / (own P)
            tokens_of_a_row = tokens / max(sum(everywhere), 1)
            items = tokens_of_a_row * own * self.processes * len(pieces)
            piece["num_items_in_batch"] = torch.tensor(items, device=piece[KEPT].device)

    def rows_of(self, piece: MicroBatch) -> int:
        """Rows of a micro-batch, over all processes."""
        return len(piece[KEPT]) * self.processes

    def kept_of(self, piece: MicroBatch) -> int:
        """Kept rows of a micro-batch, over all processes."""
        return int(piece[KEPT_EVERYWHERE]) if KEPT_EVERYWHERE in piece else self.rows_of(piece)

    def expect(self, upcoming: Pieces, passes: int) -> float:
        """Estimate the step's kept rows before a forward pass; returns the factor for the gradients accumulated so far.

        `upcoming` are the step's next known micro-batches, the current one first; the step has `passes` of them.
        Micro-batches of a generation batch that does not exist yet are estimated as the mean of the known ones.
        """
        known = [*self.done, *map(self.kept_of, upcoming)]
        before, self.divisor = self.divisor, sum(known) * passes / len(known)
        return before / self.divisor if self.done and before and self.divisor else 1.0

    def end_pass(self, piece: MicroBatch, is_last: bool) -> StepWeights | None:
        """Count a micro-batch after its forward pass; the last one ends the step, and returns the weights of the step's
        micro-batches, None if all rows are kept."""
        self.done.append(self.kept_of(piece))
        self.tokens.append(int(piece.get(KEPT_TOKENS, 0)))
        if not is_last:
            return None
        self.has_none = not any(self.done)
        passes, total, rows = len(self.done), sum(self.tokens), len(self.done) * self.rows_of(piece)
        weights = None
        if sum(self.done) != rows and total:
            weights = StepWeights([count * passes / total for count in self.tokens], rows / sum(self.done))
        self.done, self.tokens, self.divisor = [], [], 0.0
        return weights

    def changes(self, piece: MicroBatch, loss_type: str, beta: float, passes: int) -> dict[str, float] | None:
        """Factors for TRL's loss of a micro-batch: `rows` (B / K_m), `beta` and `passes`; None if nothing changes."""
        own = int(piece[KEPT].sum())
        if self.divisor == passes * self.rows_of(piece):
            return None
        rows = len(piece[KEPT]) / own if own and loss_type in AVERAGED_BY_ROWS else 1.0
        return {
            "rows": rows,
            "beta": beta * rows,
            "passes": self.divisor / (own * self.processes) if own else math.inf,
        }


def _loss_mask(piece: MicroBatch) -> torch.Tensor:
    mask: torch.Tensor = piece["completion_mask"] * piece["tool_mask"]
    return mask
