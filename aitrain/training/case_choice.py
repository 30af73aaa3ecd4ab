"""Makes what chooses the cases of a run: `--rl-sampling`, `--custom-sampler`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aitrain.options.train import TrainConfig
from aitrain.training.case_order import CaseOrder, DifficultyOrder, RefillingOrder, UniformOrder
from aitrain.training.custom_order import CustomOrder, load_sampler
from aitrain.training.refill import BatchCompletion, Refill

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


def case_choice(trainer: EpisodeTrainer, config: TrainConfig) -> BatchCompletion:
    """The order of the trainer's cases, and how its batches are completed."""
    plan, arguments, rollouts = trainer.schedule, trainer.args, trainer.rollouts
    cases = trainer.cases
    refilling: RefillingOrder = UniformOrder(
        len(cases), plan.prompts, arguments.seed if trainer.shuffle_dataset else None
    )
    if config.custom_sampler is not None:
        function, is_first = load_sampler(config.custom_sampler), arguments.process_index == 0
        refilling = CustomOrder(function, cases, plan.prompts, arguments.seed, rollouts.gather, is_first)
    order: CaseOrder = refilling
    if config.rl_sampling == "difficulty":
        order = DifficultyOrder(len(cases), plan.prompts, arguments.seed, config.score_bounds)
    refill = None
    if config.rl_sampling == "refill":
        per_step = plan.prompts * math.ceil(plan.accumulation / plan.passes)
        refill = Refill(refilling, config.rl_refill_limit, per_step)
    return BatchCompletion(cases, order, trainer.masks_truncated, refill)
