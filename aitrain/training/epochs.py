"""Epochs as one stream: every epoch uses every case once, also where its cases do not fill whole steps.

TRL leaves the last incomplete batch of each epoch out. Here the next epoch begins in the same batch, and transformers
sees the whole run as a single pass: so the position in a resumed run is the number of steps, in whichever epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from aitrain.batch import CaseSchedule


class CaseSampler(Sampler[int]):
    """Indices of cases, `generations` of each side by side, a generation batch as often as it is passed through.

    Where the cases fill whole batches, the order is that of TRL's own sampler.
    """

    def __init__(self, schedule: CaseSchedule, generations: int, seed: int | None) -> None:
        self.schedule, self.generations, self.seed = schedule, generations, seed

    def __len__(self) -> int:
        plan = self.schedule
        return plan.batches * plan.passes * plan.prompts * self.generations

    def __iter__(self) -> Iterator[int]:
        cases = self._cases()
        for _ in range(self.schedule.batches):
            batch = list(islice(cases, self.schedule.prompts))
            for _ in range(self.schedule.passes):
                for case in batch:
                    yield from repeat(case, self.generations)

    def _cases(self) -> Iterator[int]:
        """One epoch after the other, without end; each one shuffled, unless there is no seed."""
        generator = torch.Generator()
        if self.seed is not None:
            generator.manual_seed(self.seed)
        count = self.schedule.cases
        while True:
            yield from range(count) if self.seed is None else torch.randperm(count, generator=generator).tolist()


class EpochCallback(TrainerCallback):  # type: ignore[misc]
    """Counts the epochs, and does at the end of each one what transformers would do there."""

    def __init__(self, schedule: CaseSchedule) -> None:
        self.schedule = schedule

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Before the step is logged and saved. The end of the run has an event of its own."""
        state.epoch = self.schedule.epochs_after(state.global_step)
        if self.schedule.ends_epoch(state.global_step) and state.global_step < state.max_steps:
            control.should_save |= args.save_strategy == IntervalStrategy.EPOCH
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            torch.empty((), dtype=torch.int64).random_()  # as a data loader does: sampling goes on as in plain TRL
