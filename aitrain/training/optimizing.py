"""The part of the trainer that makes an optimizer step: which rows are in its loss, and which steps are skipped.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    Trainer.training_step(...)                              overridden: records the loss of each forward pass
    GRPOTrainer._prepare_inputs(generation_batch)           overridden: it sets ._buffered_inputs to the micro-batches
                                                            of each new generation batch, and returns one of them; they
                                                            are replaced where padding is trimmed
    GRPOTrainer._compute_loss(model, inputs)                overridden to leave rows out, see kept_rows.py; it reads
                                                            .beta, inputs["advantages"], inputs["num_items_in_batch"],
                                                            inputs["tool_mask"] and
                                                            .current_gradient_accumulation_steps
    accelerator.no_sync(model), .backward(loss)             used as Trainer does, where a step has several passes
    accelerator.gather(values)                              replaced meanwhile: the loss gathers values of rows, and
                                                            takes their minimum and maximum without NaN
    GRPOTrainer._metrics["train"]                           the means that the loss appends are weighted
    GRPOTrainer.importance_sampling_level                   read: whether clip ratios are means over rows
    accelerator.sync_gradients                              true in the last forward pass of an optimizer step
    Trainer._get_grad_norm(model, grad_norm)                overridden: called once per step, after backward and
                                                            clipping and before optimizer.step, which skips
                                                            parameters without a gradient
    GRPOTrainer._step, ._buffered_inputs                    read: number of forward passes so far, and the
                                                            micro-batches of a generation batch
"""

from __future__ import annotations

import math
from typing import Any

import torch

from aitrain import activity
from aitrain.engines.scopes import replaced
from aitrain.engines.sharded_tensors import whole
from aitrain.training.algorithm_trainer import AlgorithmTrainer
from aitrain.training.kept_rows import KEPT, KeptRows, MicroBatch, Pieces
from aitrain.training.micro_batches import (
    PASSES,
    RankRows,
    has_kept_rows,
    in_passes,
    micro_batches,
    of_step,
    padding_share,
)
from aitrain.training.non_finite import NonFiniteGuard
from aitrain.training.zero_variance import ZERO_VARIANCE, ZeroVarianceSteps

TOKEN_MEANS = {
    "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio",
}  # fmt: skip
"""Metrics of the loss that are means over the tokens of a micro-batch."""
CLIP_MEANS = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
"""Those that are means over its rows with one ratio for a completion; the ratio of a row without tokens is 1."""


class OptimizingTrainer(AlgorithmTrainer):
    """Leaves rows out of the loss, skips steps that are not finite, and counts the steps that changed weights."""

    rows: KeptRows
    zero_variance: ZeroVarianceSteps
    non_finite: NonFiniteGuard
    _buffered_inputs: list[dict[str, Any]] | None
    updates: int
    """Steps so far with a nonzero gradient and learning rate."""

    def training_step(self, *arguments: object, **keywords: object) -> torch.Tensor:
        """One forward and backward pass, whose loss is recorded."""
        with activity.own.doing("forward and backward pass"):
            loss: torch.Tensor = super().training_step(*arguments, **keywords)
        self.non_finite.see_loss(loss)
        if self.pass_limit is None:
            self._end_pass(self._piece, is_last=self.accelerator.sync_gradients)
        self.zero_variance.see(bool(self._piece[ZERO_VARIANCE]))
        if self.accelerator.sync_gradients:
            self.zero_variance.end_step()
        return loss

    def _prepare_inputs(self, generation_batch: object) -> MicroBatch:
        """Micro-batch of this forward pass; masks the rows of a generation batch when it is new."""
        before = self._buffered_inputs
        piece: MicroBatch = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not None and self._buffered_inputs is not before:
            if self.pass_limit is None:
                self.rows.begin_window(self._buffered_inputs)
            else:
                self._buffered_inputs = in_passes(self._buffered_inputs, self.pass_limit, self._ranks())
                piece = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        self._piece = piece
        return piece

    def _ranks(self) -> RankRows:
        accelerator = self.accelerator

        def gather(rows: torch.Tensor, pads_left: bool) -> torch.Tensor:
            padded = accelerator.pad_across_processes(rows, dim=1, pad_first=pads_left)
            everywhere: torch.Tensor = accelerator.gather(padded)
            return everywhere

        return RankRows(accelerator.num_processes, accelerator.process_index, gather)

    def _compute_loss(self, model: torch.nn.Module, inputs: MicroBatch) -> torch.Tensor:
        """Loss of a micro-batch, computed as if the optimizer step had the kept rows only."""
        if KEPT not in inputs:  # the warm-up pass, which belongs to no step
            return super()._compute_loss(model, inputs)
        if PASSES in inputs:
            return self._loss_of_passes(model, inputs)
        passes = self.current_gradient_accumulation_steps
        ratio = self.rows.expect(self._pieces_of_step(passes), passes)
        if ratio != 1.0:
            _scale_gradients(model, ratio)
        changes = self.rows.changes(inputs, self.loss_type, self.beta, passes)
        if changes is None:
            return super()._compute_loss(model, inputs)
        settings = {"beta": changes["beta"], "current_gradient_accumulation_steps": changes["passes"]}
        settings["row_factor"] = changes["rows"]
        with replaced(self, settings):
            weighted = inputs | {"advantages": inputs["advantages"] * changes["rows"]}
            return super()._compute_loss(model, weighted)

    def _loss_of_passes(self, model: torch.nn.Module, step: MicroBatch) -> torch.Tensor:
        """Loss of all forward passes of a step. The backward pass of the last one is left to the caller."""
        metrics, total = self._metrics["train"], torch.zeros((), device=self.accelerator.device)
        before = {name: len(values) for name, values in metrics.items()}
        *first, last = micro_batches(step)
        for one, divisor in first:
            with self.accelerator.no_sync(model), activity.own.doing("forward and backward pass"):
                loss = self._loss_of_pass(model, one, divisor)
                self.accelerator.backward(loss)
            total += loss.detach()
        loss = self._loss_of_pass(model, *last)
        over_rows = {"vespo/phi_seq_mean"} | (CLIP_MEANS if self.importance_sampling_level == "sequence" else set())
        for name, values in metrics.items():
            if new := values[before.get(name, 0) :]:
                values[-len(new) :] = [of_step(name, new, step, name in over_rows)]
        metrics["passes"].append(1 + len(first))
        metrics["padding"].append(padding_share(step))
        self.rows.has_none = not has_kept_rows(step)
        return loss + total

    def _loss_of_pass(self, model: torch.nn.Module, micro_batch: MicroBatch, divisor: float) -> torch.Tensor:
        accelerator = self.accelerator
        gather = accelerator.gather

        def gathered(values: torch.Tensor) -> torch.Tensor:
            """For TRL's metrics, which gather a value of each row: the passes of processes differ in their rows."""
            if values.dim():
                values = accelerator.pad_across_processes(values, dim=0, pad_index=math.nan)
            everywhere: torch.Tensor = gather(values)
            return everywhere

        settings = {"current_gradient_accumulation_steps": divisor}
        with replaced(self, settings), replaced(accelerator, {"gather": gathered}):
            return super()._compute_loss(model, micro_batch)

    def _end_pass(self, piece: MicroBatch, is_last: bool) -> None:
        """Count a micro-batch; at the end of a step, weight what it added to the metrics."""
        weights, metrics = self.rows.end_pass(piece, is_last), self._metrics["train"]
        if weights is None:
            return
        count = len(weights.tokens)
        over_rows = CLIP_MEANS if self.importance_sampling_level == "sequence" else set()
        for name in metrics.keys() & TOKEN_MEANS:
            factors = [weights.rows] * count if name in over_rows else weights.tokens
            metrics[name][-count:] = [v * factor for v, factor in zip(metrics[name][-count:], factors, strict=True)]

    def _pieces_of_step(self, passes: int) -> Pieces:
        """Remaining micro-batches of the optimizer step within this generation batch, the current one first."""
        pieces: Pieces = self._buffered_inputs or []
        left = len(pieces) * self.num_iterations - self._step % (len(pieces) * self.num_iterations)
        count = min(left, passes - len(self.rows.done))
        return [pieces[(self._step + n) % len(pieces)] for n in range(count)]

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: object = None) -> object:
        """Hook between gradient clipping and the optimizer step."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = whole(norm) if isinstance(norm, torch.Tensor) else norm
        self.non_finite.before_step(model, norm, self.state.global_step + 1)
        if self.rows.has_none:
            model.zero_grad()  # no momentum and no weight decay without a kept row
        size = 1.0 if norm is None else float(norm)
        self.updates += math.isfinite(size) and size > 0 and self._get_learning_rate() > 0
        return norm


@torch.no_grad()
def _scale_gradients(model: torch.nn.Module, ratio: float) -> None:
    """Multiply the accumulated gradients of the current step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(ratio)
