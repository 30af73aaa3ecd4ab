"""Makes what chooses the cases of a run: `--rl-sampling`, `--custom-sampler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aitrain.environment.dataset import Cases
from aitrain.environment.mixed_runner import Runner
from aitrain.training.case_order import CaseOrder, DifficultyOrder, RefillingOrder, UniformOrder
from aitrain.training.custom_order import CustomOrder, load_sampler
from aitrain.training.holdout import parts_of
from aitrain.training.mixed_order import MixedOrder
from aitrain.training.refill import BatchCompletion, Refill

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer

T = TypeVar("T", UniformOrder, DifficultyOrder)


def case_choice(trainer: EpisodeTrainer, runner: Runner) -> BatchCompletion:
    """The order of the trainer's cases, and how its batches are completed."""
    config, plan, arguments, cases = runner.config, trainer.schedule, trainer.args, trainer.cases
    shuffled = arguments.seed if trainer.shuffle_dataset else None

    def of_each(make: Callable[[Cases], T]) -> T | MixedOrder:
        orders = {part.env: make(part) for part in parts_of(cases)}
        return orders.get("") or MixedOrder(orders, list(config.env_shares.values()), plan.prompts)

    refilling: RefillingOrder = of_each(lambda part: UniformOrder(len(part), plan.prompts, shuffled))
    if config.custom_sampler is not None:
        function, is_first = load_sampler(config.custom_sampler), arguments.process_index == 0
        gather = trainer.rollouts.gather
        refilling = CustomOrder(function, cases, plan.prompts, arguments.seed, gather, is_first)
    order: CaseOrder = refilling
    if config.rl_sampling == "difficulty":
        bounds = {name: part.config.score_bounds for name, part in runner.parts.items()}
        order = of_each(lambda part: DifficultyOrder(len(part), plan.prompts, arguments.seed, bounds[part.env]))
    refill = None
    if config.rl_sampling == "refill":
        refill = Refill(refilling, config.rl_refill_limit, plan.prompts)
    return BatchCompletion(cases, order, trainer.masks_truncated, refill)
