"""The part of the trainer that computes log-probabilities, at unpadded positions and comparable with vLLM's.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    GRPOTrainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, ...)   overridden:
                                                            all log-probabilities of policy and reference model come
                                                            from it; it passes no position ids to the model
    trl.trainer.utils._ChunkedLogProbFunction               replaced for one pass, see engines/comparable_logprobs.py
    GRPOTrainer._metrics["train"]                           appended to
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from aitrain.batch import PassLimit
from aitrain.engines.comparable_logprobs import LogprobShift, SampledRow, padded
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode, replaced
from aitrain.rollout.trajectory import Trajectory
from aitrain.training.padding import LeftAligned, RightAligned, depends_on_padding
from aitrain.training.pass_plan import Rows, plan_passes

PassOutput: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities, entropies and auxiliary loss."""


class LogProbTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose log-probabilities depend neither on padding nor on an engine's truncated sampling."""

    sampling: Sampling
    """Sampling options of the policy."""
    context: int | None
    """Context length in tokens; None if unlimited."""
    aligns_rows: bool
    """Whether rows are left-aligned, so that no padding precedes a token."""
    pass_limit: PassLimit | None = None
    """Of forward passes whose padding is trimmed; None: they are as TRL makes them."""

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **more: object,
    ) -> PassOutput:
        """Values of the last `logits_to_keep` tokens, each token at its position without padding.

        Also left-aligns a padded batch that is wider than the context although none of its rows is longer. Without
        gradients TRL passes a whole generation batch with a `batch_size`, which is divided here if padding is trimmed.
        """
        compute = super()._get_per_token_logps_and_entropies
        too_wide = self.context is not None and input_ids.shape[1] > self.context
        if batch_size is not None and self.pass_limit is not None:
            return self._in_trimmed_passes(model, input_ids, attention_mask, logits_to_keep), None, None
        if self.aligns_rows or too_wide:
            left = LeftAligned.of(input_ids, attention_mask)
            logps, entropies, loss = compute(model, left.ids, left.mask, left.ids.shape[1] - 1, batch_size, **more)
            entropies = None if entropies is None else left.moved_back(entropies, logits_to_keep)
            return left.moved_back(logps, logits_to_keep), entropies, loss
        if self.pass_limit is not None:
            right = RightAligned.of(input_ids, attention_mask)
            logps, entropies, loss = compute(model, right.ids, right.mask, logits_to_keep, **more)
            return right.moved_back(logps), None if entropies is None else right.moved_back(entropies), loss
        plain: PassOutput = compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **more)
        return plain

    def _in_trimmed_passes(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> torch.Tensor:
        """Log-probabilities of a padded generation batch, from passes that are each trimmed; 0 for padding."""
        values = torch.zeros(0)
        for rows in self._passes_of(mask.sum(1).tolist()):
            prompt, completion = (max(1, int(part.sum(1).max())) for part in (mask[rows, :-keep], mask[rows, -keep:]))
            columns = slice(ids.shape[1] - keep - prompt, ids.shape[1] - keep + completion)
            output = self._get_per_token_logps_and_entropies(model, ids[rows, columns], mask[rows, columns], completion)
            values = values if len(values) else output[0].new_zeros(len(ids), keep)
            values[rows, :completion] = output[0]
        return values

    def _passes_of(self, lengths: list[int]) -> list[Rows]:
        """Rows of each forward pass over own rows that TRL or aitrain makes without gradients; with sharded weights,
        there are as many passes on each process."""
        if self.pass_limit is None:
            size = self.args.per_device_train_batch_size
            return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
        passes = plan_passes(lengths, self.pass_limit)
        most = max(gather_object([len(passes)])) if self.is_sharded else 1
        return plan_passes(lengths, self.pass_limit, at_least=most)

    def depends_on_left_padding(self) -> bool:
        """Whether padding in front of a row changes its log-probabilities. Every process must call this."""

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
            device = self.accelerator.device
            compute = super(LogProbTrainer, self)._get_per_token_logps_and_entropies
            values: torch.Tensor = compute(self.model, ids.to(device), mask.to(device), count)[0]
            return values

        model = self.accelerator.unwrap_model(self.model)
        is_precise = model.dtype == torch.float32 and not (self.args.bf16 or self.args.fp16)
        with evaluation_mode(self.model):
            vocabulary = model.get_input_embeddings().weight.shape[0]
            return depends_on_padding(log_probs, self.context, vocabulary, is_precise)

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded, so that no process can run the model before training starts."""
        return bool(self.is_fsdp_enabled)

    # -- an engine's log-probabilities compared with the trainer's

    def comparable_logprobs(self, trajectories: list[Trajectory]) -> list[list[float | None]]:
        """vLLM's log-probabilities, corrected for truncated sampling. Every process must call this."""
        reported: list[list[float | None]] = [list(each.logprobs) for each in trajectories]
        if self.sampling.is_plain:
            return reported
        rows = [SampledRow(each.prompt_ids, each.ids, each.mask, each.turn_starts) for each in trajectories]
        shifts = self._logprob_shifts(rows)
        of_sampled = [shifts[number][place] for number, row in enumerate(rows) for place in row.sampled()]
        everywhere = gather_object(of_sampled) or [0.0]
        self._metrics["train"]["sampling/logprob_shift/mean"].append(sum(everywhere) / len(everywhere))
        return [
            [None if value is None else value + shift for value, shift in zip(*pair, strict=True)]
            for pair in zip(reported, shifts, strict=True)
        ]

    def _logprob_shifts(self, rows: list[SampledRow]) -> list[list[float]]:
        """Correction for each token of each row, computed in micro-batches without dropout and gradients."""
        shifts: list[list[float]] = [[] for _ in rows]
        with evaluation_mode(self.model):
            for places in self._passes_of([len(row.prompt) + len(row.ids) for row in rows]):
                shift = LogprobShift(self.sampling, self.eos_token_ids, [rows[place] for place in places])
                with replaced(trl_utils, {"_ChunkedLogProbFunction": shift}):
                    inputs = padded(shift.rows, self.processing_class.pad_token_id, self.accelerator.device)
                    super()._get_per_token_logps_and_entropies(self.model, *inputs)
                for place, values in zip(places, shift.shifts, strict=True):
                    shifts[place] = values
        return shifts
