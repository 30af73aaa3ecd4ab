"""Rows that are left out of the loss: episodes without a score, and masked truncated ones.

TRL gives such a row no advantage, but still counts it: in the mean over the rows of a micro-batch (B), and with a KL
term and an entropy bonus of its own. Here the step becomes that of a batch which has the kept rows only, for every loss
type. With K_m kept rows in a micro-batch of this process, K in the whole optimizer step, over all P processes, whose
gradients DDP averages:

* the masks of the others are zero, so that they add nothing to any sum;
* a mean over B rows becomes one over K_m: the terms that are averaged by rows, which are linear in advantages and beta,
  get both times B / K_m;
* a micro-batch counts by its rows: TRL divides it by the number of micro-batches of the step, here by K / (K_m P);
* losses that are averaged over all tokens are divided by as many tokens as K rows of this generation batch have.

With nothing left out, all of these are TRL's own numbers, and nothing is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Pieces: TypeAlias = list[dict[str, Any]]
"""A generation batch as TRL keeps it: the micro-batches of this process."""

AVERAGED_BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")

KEPT = "kept"
"""Of a micro-batch: which of its rows are in the loss, shape (B,)."""
KEPT_EVERYWHERE = "kept_everywhere"
"""Of a micro-batch: how many rows are in the loss, over all processes."""


@dataclass
class KeptRows:
    """Counts kept rows over the micro-batches of an optimizer step."""

    processes: int
    total: Callable[[torch.Tensor], torch.Tensor]
    """The sum of a tensor over all processes."""
    done: list[int] = field(default_factory=list)
    """Kept rows of the step's micro-batches so far, over all processes."""
    divisor: float = 0.0
    """Kept rows of the whole step, as far as is known."""
    has_none: bool = False
    """Whether nothing was kept in the step that has just ended."""

    def begin_window(self, pieces: Pieces) -> None:
        """Leave rows out of a new generation batch. Every process must call this."""
        kept = [int(piece[KEPT].sum()) for piece in pieces]
        tokens = sum(int((_loss_mask(piece) * piece[KEPT].unsqueeze(1)).sum()) for piece in pieces)
        counts = self.total(torch.tensor([*kept, tokens], device=pieces[0][KEPT].device)).tolist()
        everywhere, tokens = counts[:-1], counts[-1]
        if sum(everywhere) == sum(map(self.rows_of, pieces)):
            return
        for piece, own, count in zip(pieces, kept, everywhere, strict=True):
            piece["tool_mask"] = piece["tool_mask"] * piece[KEPT].unsqueeze(1)
            piece[KEPT_EVERYWHERE] = torch.tensor(count, device=piece[KEPT].device)
            # TRL divides this by the processes and by the pieces, and multiplies it by our K / (own P)
            tokens_of_a_row = tokens / max(sum(everywhere), 1)
            items = tokens_of_a_row * own * self.processes * len(pieces)
            piece["num_items_in_batch"] = torch.tensor(items, device=piece[KEPT].device)

    def rows_of(self, piece: dict[str, Any]) -> int:
        """Rows of a micro-batch over all processes."""
        return len(piece[KEPT]) * self.processes

    def kept_of(self, piece: dict[str, Any]) -> int:
        """Those of them that are in the loss."""
        return int(piece[KEPT_EVERYWHERE]) if KEPT_EVERYWHERE in piece else self.rows_of(piece)

    def expect(self, upcoming: Pieces, passes: int) -> float:
        """Before a forward pass: the kept rows of the whole step, of `passes` micro-batches, and what the gradients so
        far are to be multiplied by. `upcoming`: its next micro-batches, this one first.

        Micro-batches of a generation batch that does not exist yet are taken to be like the others, which is put right
        when it does.
        """
        known = [*self.done, *map(self.kept_of, upcoming)]
        before, self.divisor = self.divisor, sum(known) * passes / len(known)
        return before / self.divisor if self.done and before and self.divisor else 1.0

    def end_pass(self, piece: dict[str, Any], is_last: bool) -> None:
        """After a forward pass; the last one ends the step."""
        self.done.append(self.kept_of(piece))
        if is_last:
            self.has_none = not any(self.done)
            self.done, self.divisor = [], 0.0

    def changes(self, piece: dict[str, Any], loss_type: str, beta: float, passes: int) -> dict[str, float] | None:
        """What TRL is to compute with in a micro-batch: `rows` (B / K_m), `beta` and `passes`; None: as it is."""
        own = int(piece[KEPT].sum())
        if self.divisor == passes * self.rows_of(piece):
            return None
        rows = len(piece[KEPT]) / own if own and loss_type in AVERAGED_BY_ROWS else 1.0
        return {
            "rows": rows,
            "beta": beta * rows,
            "passes": self.divisor / (own * self.processes) if own else math.inf,
        }


def _loss_mask(piece: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = piece["completion_mask"] * piece["tool_mask"]
    return mask
