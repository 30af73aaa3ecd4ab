"""Groups that teach nothing, because no episode in them has an advantage, and runs that have only such groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

ZERO_VARIANCE = "flat"
"""Of a micro-batch: whether its generation batch has no advantages on any process."""


def zero_variance_share(scores: torch.Tensor, kept: torch.Tensor, size: int) -> float:
    """Share of the groups in which no episode that is in the loss has an advantage: all scores are equal, or fewer than
    two episodes are scored. Both tensors have one entry an episode, groups side by side; NaN is no score."""
    groups, kept = scores.view(-1, size), kept.bool().view(-1, size)
    low = groups.nan_to_num(nan=math.inf).amin(1, keepdim=True)
    spread = groups.nan_to_num(nan=-math.inf).amax(1, keepdim=True) - low
    distance = (groups - groups.nanmean(1, keepdim=True)).abs()
    has_advantage = kept & (distance > 1e-3 * spread)  # equal scores may differ from their mean by rounding
    return 1.0 - has_advantage.any(1).float().mean().item()


@dataclass
class ZeroVarianceSteps:
    """How many optimizer steps in a row, up to the last one, had flat groups only."""

    in_a_row: int = 0
    reward: float | None = None
    """Mean score of the newest generation batch."""
    is_flat: bool = True
    """Whether all generation batches of the step under way are flat, as far as they are known."""

    def see(self, is_flat: bool) -> None:
        """One micro-batch of the step under way, by its generation batch."""
        self.is_flat = self.is_flat and is_flat

    def end_step(self) -> None:
        """The step under way is done."""
        self.in_a_row = self.in_a_row + 1 if self.is_flat else 0
        self.is_flat = True


class StopOnZeroVariance(TrainerCallback):  # type: ignore[misc]
    """Ends a run in which nothing is left to learn, or nothing can be, on every process: all of them count alike.

    The count is part of a checkpoint, so a resumed run stops after the same step as one that was never interrupted. A
    run that was ended here and is resumed gets all its steps again.
    """

    def __init__(self, steps: int, count: ZeroVarianceSteps, stop: Callable[[str], None]) -> None:
        self.steps = steps
        self.count = count
        self.stop = stop

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Before the callback that obeys: the run ends after this step, not after the next one."""
        lasts = self.count.in_a_row
        if lasts < self.steps:
            return
        reward = self.count.reward
        level = "" if reward is None else f", the last ones all near {reward:.2f}"
        self.stop(f"in {lasts} steps no group's scores differed{level} (--stop-when-flat {self.steps})")
        self.count.in_a_row = 0
