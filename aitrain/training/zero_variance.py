"""Counts groups without advantages, and stops a run that has only such groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


def has_advantages(scores: torch.Tensor, kept: torch.Tensor, size: int) -> torch.Tensor:
    """Whether each group has a nonzero advantage among the episodes in the loss.

    `scores` and `kept` have shape (episodes,), with the members of a group next to each other; NaN means unscored.
    """
    groups, kept = scores.view(-1, size), kept.bool().view(-1, size)
    low = groups.nan_to_num(nan=math.inf).amin(1, keepdim=True)
    spread = groups.nan_to_num(nan=-math.inf).amax(1, keepdim=True) - low
    distance = (groups - groups.nanmean(1, keepdim=True)).abs()
    return (kept & (distance > 1e-3 * spread)).any(1)  # rounding may make equal scores differ from their mean


def zero_variance_share(scores: torch.Tensor, kept: torch.Tensor, size: int) -> float:
    """Share of the groups without a nonzero advantage; 1 if there are no groups."""
    return 1.0 - has_advantages(scores, kept, size).float().mean().item() if len(scores) else 1.0


@dataclass
class ZeroVarianceSteps:
    """Counts consecutive optimizer steps in which all groups had zero variance, and stops the run after `limit` of
    them. Every process counts the same steps. The count is part of a checkpoint, so that a resumed run stops after the
    same step as an uninterrupted one; it starts at zero when a run that was stopped here is resumed."""

    limit: int | None = None
    stop: Callable[[str], None] = lambda _: None
    in_a_row: int = 0
    is_flat: bool = False
    """Whether all groups of the latest generation batch had zero variance, on all processes."""
    reward: float | None = None
    """Mean score of the latest generation batch."""

    def see(self, is_flat: bool, reward: float | None) -> None:
        """Note a new generation batch."""
        self.is_flat, self.reward = is_flat, reward

    def end_step(self) -> None:
        """Count the step."""
        self.in_a_row = self.in_a_row + 1 if self.is_flat else 0
        if self.limit is None or self.in_a_row < self.limit:
            return
        level = "" if self.reward is None else f", the last ones all near {self.reward:.2f}"
        self.stop(f"in {self.in_a_row} steps no group's scores differed{level} (--stop-when-flat {self.limit})")
        self.in_a_row = 0
