"""The part of the trainer that can be put into a checkpoint and back.

Where this depends on the inside of TRL 1.16 and transformers 5.17 (tests/training/test_upstream.py):

    GRPOTrainer._step, ._buffered_inputs                    saved and restored: forward passes so far, and the pieces of
                                                            a batch that is used for longer than one step
    GRPOTrainer._metrics["train"]                           saved and restored: what has not been logged yet; likewise
                                                            ._tr_loss, ._total_loss_scalar, ._globalstep_last_logged
    Trainer._load_from_checkpoint(checkpoint)               called, for the weights alone
    Trainer.train(resume_from_checkpoint)                   not called for a checkpoint of the last step: it trains one
                                                            step more
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerState

from aitrain.engines.scopes import replaced
from aitrain.training.optimizing import OptimizingTrainer
from aitrain.training.policy_rollouts import PolicyRollouts


class ResumableTrainer(OptimizingTrainer):
    """Saves and restores the state that transformers does not save, and loads weights from checkpoints."""

    rollouts: PolicyRollouts

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Does not shard the model a second time."""
        if not self.is_fsdp_enabled:
            return super()._prepare_for_training(*arguments, **keywords)
        with replaced(self.accelerator, {"prepare": lambda model, optimizer: (model, optimizer)}):
            return super()._prepare_for_training(*arguments, **keywords)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last whole step. Every process must call this."""
        self._save_checkpoint(self.model, None)

    def is_over(self, checkpoint: Path) -> bool:
        """Load a checkpoint if it is of the last step, after which transformers would train one more; returns whether
        it is. Every process must call this."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step < self.args.max_steps or self.is_deepspeed_enabled:
            return False
        self.take_weights(checkpoint)
        self.state = state
        return True

    def take_weights(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint. Every process must call this."""
        self._load_from_checkpoint(str(checkpoint))
        self.rollouts.invalidate_weights()

    @property
    def has_moved_reference(self) -> bool:
        """Whether the reference model has been synced from the policy."""
        args = self.args
        return bool(args.sync_ref_model and self.state.global_step >= args.ref_model_sync_steps)

    def rest_of_window(self) -> list[dict[str, Any]]:
        """The micro-batches of the last generation batch if some are not trained on yet, else none."""
        is_inside = self._step % (self.args.steps_per_generation * self.num_iterations)
        return (self._buffered_inputs or []) if is_inside else []

    def unlogged(self) -> dict[str, Any]:
        """This process's position, and its values for the next line of metrics."""
        return {
            "step": self._step,
            "metrics": dict(self._metrics["train"]),
            "loss": self._tr_loss.item(),
            "total_loss": self._total_loss_scalar,
            "logged": self._globalstep_last_logged,
            "skipped": [self.non_finite.skipped, self.non_finite.in_a_row],
            "flat_steps": self.zero_variance.in_a_row,
        }

    def restore_state(self, pieces: list[dict[str, Any]], values: dict[str, Any]) -> None:
        """Restore the `rest_of_window` and `unlogged` of an earlier process."""
        self._step, self._buffered_inputs = values["step"], pieces or None
        self._metrics["train"].update(values["metrics"])
        self._tr_loss = torch.tensor(values["loss"], device=self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = values["total_loss"], values["logged"]
        self.non_finite.skipped, self.non_finite.in_a_row = values["skipped"]
        self.zero_variance.in_a_row = values["flat_steps"]
