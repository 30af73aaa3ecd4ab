"""Epochs as one stream of cases: each epoch uses each case once, even if its last step is incomplete.

TRL drops the last incomplete batch of each epoch. Here the next epoch starts in the same batch, and transformers sees
the whole run as one epoch, so that the number of steps alone is the position of a resumed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from aitrain.batch import CaseSchedule


class CaseSampler(Sampler[int]):
    """Yields each case index `generations` times in a row, and each generation batch once per pass over it.

    The order is that of TRL's sampler if the cases fill whole batches.
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
        """Case indices of epoch after epoch, endless; each epoch is shuffled if there is a seed."""
        generator = torch.Generator()
        if self.seed is not None:
            generator.manual_seed(self.seed)
        count = self.schedule.cases
        while True:
            yield from range(count) if self.seed is None else torch.randperm(count, generator=generator).tolist()


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
