"""Epochs as one stream of cases: each epoch uses each case once, even if its last step is incomplete.

TRL drops the last incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees
the whole run as one epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from aitrain.batch import CaseSchedule


class CaseSampler(Sampler[int]):
    """As many rows as TRL consumes: each generation batch once for each step on it, each case `generations` times.

    TRL only counts the rows; batch_source.py says which cases a batch has.
    """

    def __init__(self, schedule: CaseSchedule, generations: int) -> None:
        self.schedule, self.generations = schedule, generations

    def __len__(self) -> int:
        plan = self.schedule
        return plan.batches * plan.updates * plan.prompts * self.generations

    def __iter__(self) -> Iterator[int]:
        yield from (row % self.schedule.cases for row in range(len(self)))


class EpochCallback(TrainerCallback):  # type: ignore[misc]
    """Sets the fractional epoch, and saves and logs at the end of each epoch as transformers does."""

    def __init__(self, schedule: CaseSchedule) -> None:
        self.schedule = schedule

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs before the step is logged and saved; the end of the run is handled by transformers."""
        state.epoch = self.schedule.epochs_after(state.global_step)
        if not self.schedule.ends_epoch(state.global_step):
            return
        if state.global_step < state.max_steps:
            control.should_save |= args.save_strategy == IntervalStrategy.EPOCH
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        # consumes the random number of plain TRL's new DataLoader; also in the last step, from which a run may continue
        torch.empty((), dtype=torch.int64).random_()
