"""What comes before and after each optimizer step, in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


class StepEvents(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Times the steps of a trainer, counts its epochs, and ends it if nothing more can be learned."""

    def __init__(self, trainer: EpisodeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock of the training."""
        self.trainer.watch.begin_training()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Stop it."""
        self.trainer.watch.end_training()

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock of the step."""
        self.trainer.watch.begin_step()

    def on_optimizer_step(self, args: object, state: TrainerState, control: object, **parts: Any) -> None:
        """Check the weights, before anything is saved."""
        self.trainer.non_finite.check_weights(parts["model"], state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs before the step is logged and saved; the end of the run is handled by transformers. Sets the fractional
        epoch, and saves and logs at the end of each epoch as transformers does."""
        self.trainer.watch.end_step()
        self.trainer.zero_variance.end_step()
        schedule, step = self.trainer.schedule, state.global_step
        state.epoch = schedule.epochs_after(step)
        if not schedule.ends_epoch(step):
            return
        if step < state.max_steps:
            control.should_save |= args.save_strategy == IntervalStrategy.EPOCH
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        # consumes the random number of plain TRL's new DataLoader; also in the last step, from which a run may continue
        torch.empty((), dtype=torch.int64).random_()
