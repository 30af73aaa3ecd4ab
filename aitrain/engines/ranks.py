"""Batch sizes that ranks which generate together agree on."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def largest_over_ranks(accelerator: Accelerator, rows: int, max_tokens: int) -> tuple[int, int]:
    """The largest numbers of rows and tokens over all ranks. Every rank must call this."""
    own = torch.tensor([[rows, max_tokens]], device=accelerator.device)
    rows, max_tokens = accelerator.gather(own).max(dim=0).values.tolist()
    return rows, max_tokens
