"""Makes what chooses the cases of a run: `--rl-sampling`, `--custom-sampler`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aitrain.environment.mixed_runner import Runner
from aitrain.training.case_order import DifficultyOrder, UniformOrder
from aitrain.training.holdout import parts_of
from aitrain.training.mixed_order import EnvOrder, MixedOrder
from aitrain.training.refill import BatchCompletion, Refill

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer


def case_choice(trainer: EpisodeTrainer, runner: Runner) -> BatchCompletion:
    """The order of the trainer's cases, and how its batches are completed."""
    config, plan, seed = runner.config, trainer.schedule, trainer.args.seed
    orders: dict[str, EnvOrder] = {
        cases.env: DifficultyOrder(len(cases), plan.prompts, seed, runner.parts[cases.env].config.score_bounds)
        if config.rl_sampling == "difficulty"
        else UniformOrder(len(cases), plan.prompts, seed if trainer.shuffle_dataset else None)
        for cases in parts_of(trainer.cases)
    }
    order: EnvOrder | MixedOrder = orders.get("") or MixedOrder(orders, list(config.env_shares.values()), plan.prompts)
    refill = None
    if config.rl_sampling == "refill" and not isinstance(order, DifficultyOrder):
        per_step = plan.prompts * math.ceil(plan.accumulation / plan.passes)
        refill = Refill(order, config.rl_refill_limit, per_step)
    return BatchCompletion(trainer.rollouts, trainer.cases, order, trainer.masks_truncated, refill)
