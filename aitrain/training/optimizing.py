"""The part of the trainer that makes an optimizer step: which rows are in its loss, and what is known of it.

Where we lean on the inside of TRL 1.16 (tests/training/test_upstream.py):

    Trainer.training_step(...)                              overridden: sees the loss of each forward pass
    GRPOTrainer._prepare_inputs(generation_batch)           overridden: it replaces ._buffered_inputs by the
                                                            micro-batches of each new generation batch, and returns one
    GRPOTrainer._compute_loss(model, inputs)                overridden: rows are left out of it, see kept_rows.py; it
                                                            averages by .beta, inputs["advantages"],
                                                            inputs["num_items_in_batch"], inputs["tool_mask"] and
                                                            .current_gradient_accumulation_steps, which it only reads
    accelerator.sync_gradients                              true in the last forward pass of an optimizer step
    Trainer._get_grad_norm(model, grad_norm)                overridden: called once a step, after backward and clipping
                                                            and before optimizer.step, which skips what has no gradient
    GRPOTrainer._step, ._buffered_inputs                    read: forward passes so far, and the pieces of a generation
                                                            batch
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from aitrain import activity
from aitrain.training.kept_rows import KEPT, KeptRows
from aitrain.training.logprobs import LogProbTrainer
from aitrain.training.non_finite import NonFiniteGuard
from aitrain.training.scopes import replaced
from aitrain.training.zero_variance import ZERO_VARIANCE, ZeroVarianceSteps


class OptimizingTrainer(LogProbTrainer):
    """Its steps leave rows out of the loss, skip numbers that are not finite, and count what there was to learn."""

    rows: KeptRows
    flat: ZeroVarianceSteps
    finite: NonFiniteGuard
    updates: int
    """Steps so far that had a gradient and a learning rate."""

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """One forward and backward pass; its loss is looked at."""
        with activity.own.doing("forward and backward pass"):
            loss: torch.Tensor = super().training_step(*arguments, **keywords)
        self.finite.see_loss(loss)
        self.rows.end_pass(self._piece, is_last=self.accelerator.sync_gradients)
        self.flat.see(bool(self._piece[ZERO_VARIANCE]))
        if self.accelerator.sync_gradients:
            self.flat.end_step()
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """The micro-batch of this forward pass; a new generation batch, of which it may be the first, is complete."""
        before = self._buffered_inputs
        piece: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not None and self._buffered_inputs is not before:
            self.rows.begin_window(self._buffered_inputs)
        self._piece = piece
        return piece

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of a micro-batch, as if the optimizer step had the kept rows only."""
        if KEPT not in inputs:  # a warm-up pass, which is part of no step
            return cast(torch.Tensor, super()._compute_loss(model, inputs))
        passes = self.current_gradient_accumulation_steps
        ratio = self.rows.expect(self._pieces_of_step(passes), passes)
        if ratio != 1.0:
            _scale_gradients(model, ratio)
        changes = self.rows.changes(inputs, self.loss_type, self.beta, passes)
        if changes is None:
            return cast(torch.Tensor, super()._compute_loss(model, inputs))
        settings = {"beta": changes["beta"], "current_gradient_accumulation_steps": changes["passes"]}
        with replaced(self, settings):
            weighted = inputs | {"advantages": inputs["advantages"] * changes["rows"]}
            return cast(torch.Tensor, super()._compute_loss(model, weighted))

    def _pieces_of_step(self, passes: int) -> list[dict[str, Any]]:
        """What is known of the rest of an optimizer step: its micro-batches of this generation batch, this one
        first."""
        pieces: list[dict[str, Any]] = self._buffered_inputs or []
        left = len(pieces) * self.num_iterations - self._step % (len(pieces) * self.num_iterations)
        count = min(left, passes - len(self.rows.done))
        return [pieces[(self._step + n) % len(pieces)] for n in range(count)]

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The last moment before the optimizer's step at which the gradient's norm is known."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.finite.before_step(model, norm, self.state.global_step + 1)
        if self.rows.has_none:
            model.zero_grad(set_to_none=True)  # no momentum and no decay either: there is nothing to learn from
        self.updates += norm is None or (math.isfinite(norm) and norm > 0 and self._get_learning_rate() > 0)
        return norm


@torch.no_grad()
def _scale_gradients(model: torch.nn.Module, ratio: float) -> None:
    """Of the forward passes of this step so far."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(ratio)
