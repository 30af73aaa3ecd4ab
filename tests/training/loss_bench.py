"""The loss of the real trainer on fixed tensors: no model, no generation, many processes in one."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from aitrain import TrainConfig
from aitrain.batch import PassLimit, plan_batch
from aitrain.training.algorithm import AlgorithmParts
from aitrain.training.model import Precision
from aitrain.training.passes import KEPT
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.trl_arguments import grpo_arguments, grpo_config

CPU = Precision(torch.float32, "no", use_cpu=True)
WORDS, LONGEST = 7, 5
WHOLE = PassLimit(100)
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How rows are shared out: a generation batch has `rows` on each process for each of its `steps`."""

    processes: int = 1
    rows: int = 8
    steps: int = 1
    limit: PassLimit = WHOLE
    trims: bool = False

    @property
    def batch(self) -> int:
        """Rows of a generation batch, over all processes."""
        return self.processes * self.steps * self.rows

    def rows_of_step(self, step: int) -> torch.Tensor:
        """Mask of the rows of a generation batch that a step trains on."""
        place = torch.zeros(self.processes, self.steps, self.rows, dtype=torch.bool)
        place[:, step] = True
        return place.flatten()


def policy() -> torch.nn.Embedding:
    """The next word's logits by the last one, so that a row's log-probabilities are its own affair."""
    torch.manual_seed(1)
    return torch.nn.Embedding(WORDS, WORDS, dtype=torch.float64)


def batch_of(count: int, are_ragged: bool, seed: int = 0) -> Rows:
    """Rows with log-probabilities that are off the policy's, of one length or of several."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (count, LONGEST + 1), generator=generator)
    noise = torch.randn((2, count, LONGEST), generator=generator, dtype=torch.float64) * 0.3
    logps = policy_logps(policy(), ids[:, :1], ids[:, 1:])[0].detach()
    lengths = torch.arange(count) % LONGEST + 1 if are_ragged else torch.full((count,), LONGEST - 1)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(count, 1, dtype=torch.long),
        "completion_ids": ids[:, 1:],
        "completion_mask": torch.ones(count, LONGEST, dtype=torch.long),
        "tool_mask": (torch.arange(LONGEST) < lengths.unsqueeze(1)).long(),
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "old_per_token_logps": logps + noise[0],
        "ref_per_token_logps": logps + noise[1],
        KEPT: torch.ones(count, dtype=torch.bool),
    }


def policy_logps(model: torch.nn.Embedding, prompts: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Log-probabilities of each word and entropies, both (rows, words)."""
    last = torch.cat([prompts, ids], dim=1)[:, :-1]
    logps = model(last).log_softmax(-1)
    return logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(logps.exp() * logps).sum(-1)


def arguments(folder: Path, layout: Layout, **options: Any) -> GRPOConfig:
    """TRL's configuration as aitrain makes it."""
    config = TrainConfig(rl_max_new_tokens=LONGEST, rl_updates_per_rollout=layout.steps, **options)
    plan = plan_batch(config, 1)
    made = grpo_config(grpo_arguments(config, plan, CPU), config, folder)
    made.algorithm = AlgorithmParts.of(config)
    return made


class LossTrainer(EpisodeTrainer):
    """The real losses; what they need of a trainer is set by hand."""

    is_fsdp_enabled = False

    def __init__(self, args: GRPOConfig, layout: Layout) -> None:
        accelerator = SimpleNamespace(
            num_processes=layout.processes,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, **_: x,
            reduce=lambda x, reduction: x,
            sync_gradients=False,
            device=torch.device("cpu"),
            no_sync=lambda model: nullcontext(),
            backward=torch.Tensor.backward,
            gradient_state=SimpleNamespace(_set_sync_gradients=lambda value: None),
        )
        vars(self).update(
            args=args, accelerator=accelerator, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)}, trims=layout.trims, pass_limit=layout.limit,
            beta=args.beta, loss_type=args.loss_type, importance_sampling_level=args.importance_sampling_level,
            epsilon_low=args.epsilon, epsilon_high=args.epsilon_high, max_completion_length=args.max_completion_length,
            top_entropy_quantile=args.top_entropy_quantile, off_policy_mask_threshold=None, aux_loss_enabled=False,
            use_vllm=args.use_vllm, vllm_importance_sampling_correction=True, entropy_coef=args.entropy_coef,
            use_adaptive_entropy=False, _entropy_bonus_enabled=args.entropy_coef != 0,
            current_gradient_accumulation_steps=1, algorithm=vars(args)["algorithm"], shares_prompts=False,
        )  # fmt: skip

    def _get_per_token_logps_and_entropies(self, model: Any, ids: torch.Tensor, _: Any, keep: int, **__: Any) -> Any:
        return *policy_logps(model, ids[:, -keep - 1 : -keep], ids[:, -keep:]), None


def gradient_of_plain_trl(args: GRPOConfig, rows: Rows, items: float | None = None) -> torch.Tensor:
    """TRL's own loss of one micro-batch that is the whole step."""
    trainer = LossTrainer(args, Layout(rows=len(rows["advantages"])))
    before, args.steps_per_generation = args.steps_per_generation, 1
    tokens = (rows["completion_mask"] * rows["tool_mask"]).sum() if items is None else torch.tensor(items)
    model = policy()
    GRPOTrainer._compute_loss(trainer, model, rows | {"num_items_in_batch": tokens}).backward()
    args.steps_per_generation = before
    assert model.weight.grad is not None
    return model.weight.grad


def take(rows: Rows, which: Any) -> Rows:
    """Some rows of a batch."""
    return {name: values[which] if values.dim() else values for name, values in rows.items()}


def gradients_of_steps(args: GRPOConfig, layout: Layout, batch: Rows) -> list[torch.Tensor]:
    """What the optimizer gets in each step on a generation batch, as DDP averages it over the processes; the policy
    stays as it is."""
    trained = [steps_of_process(args, layout, batch, process)[0] for process in range(layout.processes)]
    return [torch.stack(gradients).mean(0) for gradients in zip(*trained, strict=True)]


def steps_of_process(
    args: GRPOConfig, layout: Layout, batch: Rows, process: int = 0
) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """The gradient of each step on one process, and the metrics that its loss adds."""
    tokens = (batch["completion_mask"] * batch["tool_mask"]).sum(1) * batch[KEPT]
    items = {"num_items_in_batch": tokens.double().sum() / batch[KEPT].sum().clamp(min=1) * layout.steps}
    trainer, gradients, metrics = LossTrainer(args, layout), [], []
    trainer.accelerator.process_index = process
    for step in range(layout.steps):
        first = (process * layout.steps + step) * layout.rows
        piece, whole = take(batch, slice(first, first + layout.rows)), take(batch, layout.rows_of_step(step))
        everywhere = {id(value): whole[name] for name, value in piece.items()}
        trainer.accelerator.gather = lambda values, everywhere=everywhere: everywhere.get(id(values), values)
        model = policy()
        trainer._compute_loss(model, piece | items).backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad)
        metrics.append({name: values[-1] for name, values in trainer._metrics["train"].items()})
    return gradients, metrics
