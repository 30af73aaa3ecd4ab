"""The part of the trainer that can be put into a checkpoint and back.

Where this depends on the inside of TRL 1.16 and transformers 5.17 (tests/training/test_upstream.py):

    GRPOTrainer._step, ._buffered_inputs                    saved and restored: forward passes so far, and the pieces of
                                                            a batch that is used for longer than one step
    GRPOTrainer._metrics["train"]                           saved and restored: what has not been logged yet; likewise
                                                            ._tr_loss, ._total_loss_scalar, ._globalstep_last_logged
    Trainer._load_from_checkpoint(checkpoint)               overridden, for the weights alone; under FSDP2, so
                                                            are .save_model, ._save_optimizer_and_scheduler,
                                                            ._load_optimizer_and_scheduler and ._prepare_for_training
    transformers.trainer.save_fsdp_model, .save_fsdp_optimizer, .load_fsdp_optimizer    replaced meanwhile
    Trainer.train(resume_from_checkpoint)                   not called for a checkpoint of the last step: it trains one
                                                            step more
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import TrainerState

from aitrain.engines.scopes import replaced
from aitrain.engines.sharded_tensors import gathered
from aitrain.runs.checkpoint import SHARDS
from aitrain.training.optimizing import OptimizingTrainer
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.sharded_state import (
    load_weights,
    own_weights,
    read_optimizer,
    write_optimizer,
    write_shards,
)


class ResumableTrainer(OptimizingTrainer):
    """Saves and restores the state that transformers does not save, and loads weights from checkpoints."""

    rollouts: PolicyRollouts

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Does not shard the model a second time."""
        if not self.is_fsdp_enabled:
            return super()._prepare_for_training(*arguments, **keywords)
        with replaced(self.accelerator, {"prepare": lambda model, optimizer: (model, optimizer)}):
            return super()._prepare_for_training(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, gathered; into a sharded checkpoint each process writes its part. Every process must call
        this."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        folder = str(output_dir or self.args.output_dir)
        weights = own_weights(self.model)
        if _internal_call and self.writes_shards:
            write_shards(weights, Path(folder) / SHARDS)
            return
        tensors = gathered(weights.items(), self.args.should_save)
        if self.args.should_save:
            self._save(folder, state_dict=tensors)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        def write(*_: object) -> None:
            write_optimizer(self.optimizer, Path(output_dir), self.args.should_save, self.writes_shards)

        ours = {"save_fsdp_model": lambda *_, **__: None, "save_fsdp_optimizer": write}
        with replaced(transformers_trainer, ours):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        def read(*_: object, **__: object) -> None:
            read_optimizer(self.optimizer, Path(str(checkpoint)))

        with replaced(transformers_trainer, {"load_fsdp_optimizer": read}):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled or not isinstance(self.model, PeftModel):
            load_weights(self.model, Path(resume_from_checkpoint))  # transformers only warns of weights that it misses
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @property
    def writes_shards(self) -> bool:
        """Whether each process writes its part of a checkpoint."""
        return bool(self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type))

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last whole step. Every process must call this."""
        self._save_checkpoint(self.model, None)

    def is_over(self, checkpoint: Path) -> bool:
        """Load a checkpoint if it is of the last step, after which transformers would train one more; returns whether
        it is. Every process must call this."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step < self.args.max_steps:
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
