"""Makes what chooses the cases of a run: `--rl-sampling`, `--custom-sampler`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aitrain.options.train import TrainConfig
from aitrain.training.case_order import CaseOrder, DifficultyOrder, UniformOrder
from aitrain.training.refill import BatchCompletion, Refill

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


def case_choice(trainer: EpisodeTrainer, config: TrainConfig) -> BatchCompletion:
    """The order of the trainer's cases, and how its batches are completed."""
    plan, arguments = trainer.schedule, trainer.args
    uniform = UniformOrder(len(trainer.cases), plan.prompts, arguments.seed if trainer.shuffle_dataset else None)
    order: CaseOrder = uniform
    if config.rl_sampling == "difficulty":
        order = DifficultyOrder(len(trainer.cases), plan.prompts, arguments.seed, config.score_bounds)
    refill = None
    if config.rl_sampling == "refill":
        per_step = plan.prompts * math.ceil(plan.accumulation / plan.passes)
        refill = Refill(uniform, config.rl_refill_limit, per_step)
    return BatchCompletion(trainer.rollouts, trainer.cases, order, trainer.masks_truncated, refill)
