"""The part of the trainer that computes log-probabilities, at unpadded positions and comparable with vLLM's.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    GRPOTrainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, ...)   overridden:
                                                            all log-probabilities of policy and reference model come
                                                            from it; it passes no position ids to the model
    trl.trainer.utils._ChunkedLogProbFunction               replaced for one pass, see engines/comparable_logprobs.py
    GRPOTrainer._metrics["train"]                           appended to
"""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from aitrain.engines.comparable_logprobs import LogprobShift, SampledRow, padded
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode, replaced
from aitrain.rollout.trajectory import Trajectory
from aitrain.training.padding import LeftAligned, depends_on_padding


class LogProbTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose log-probabilities depend neither on padding nor on an engine's truncated sampling."""

    sampling: Sampling
    """Sampling options of the policy."""
    context: int | None
    """Context length in tokens; None if unlimited."""
    aligns_rows: bool
    """Whether rows are left-aligned, so that no padding precedes a token."""

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *rest: object,
        **more: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Values of the last `logits_to_keep` tokens, each token at its position without padding.

        Also left-aligns a padded batch that is wider than the context although none of its rows is longer.
        """
        compute = super()._get_per_token_logps_and_entropies
        too_wide = self.context is not None and input_ids.shape[1] > self.context
        if not (self.aligns_rows or too_wide):
            plain: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = compute(
                model, input_ids, attention_mask, logits_to_keep, *rest, **more
            )
            return plain
        rows = LeftAligned.of(input_ids, attention_mask)
        logps, entropies, loss = compute(model, rows.ids, rows.mask, rows.ids.shape[1] - 1, *rest, **more)
        entropies = None if entropies is None else rows.moved_back(entropies, logits_to_keep)
        return rows.moved_back(logps, logits_to_keep), entropies, loss

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
        return bool(self.is_fsdp_enabled or is_deepspeed_zero3_enabled())

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
        size, pad = self.args.per_device_train_batch_size, self.processing_class.pad_token_id
        shifts: list[list[float]] = []
        with evaluation_mode(self.model):
            for start in range(0, len(rows), size):
                shift = LogprobShift(self.sampling, self.eos_token_ids, rows[start : start + size])
                with replaced(trl_utils, {"_ChunkedLogProbFunction": shift}):
                    inputs = padded(shift.rows, pad, self.accelerator.device)
                    self._get_per_token_logps_and_entropies(self.model, *inputs)
                shifts += shift.shifts
        return shifts
