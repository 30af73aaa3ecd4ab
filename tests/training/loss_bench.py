"""The loss of the real trainer on fixed tensors: no model, no generation, many processes in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from aitrain import TrainConfig
from aitrain.batch import plan_batch
from aitrain.training.algorithm import Algorithm
from aitrain.training.kept_rows import KEPT, KeptRows
from aitrain.training.model import Precision
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.trl_arguments import grpo_arguments, grpo_config

WORDS, LONGEST = 7, 5


@dataclass(frozen=True)
class Layout:
    """How rows are shared out: of a generation batch, `pieces` micro-batches of `rows` on each process."""

    processes: int = 1
    passes: int = 1
    pieces: int = 1
    rows: int = 8
    iterations: int = 1

    @property
    def batch(self) -> int:
        """Rows of a generation batch, over all processes."""
        return self.processes * self.pieces * self.rows


def policy() -> torch.nn.Embedding:
    """The next word's logits by the last one, so that a row's log-probabilities are its own affair."""
    torch.manual_seed(1)
    return torch.nn.Embedding(WORDS, WORDS, dtype=torch.float64)


def batch_of(count: int, are_ragged: bool, seed: int = 0) -> dict[str, torch.Tensor]:
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
    config = TrainConfig(rl_max_new_tokens=LONGEST, batch_size=layout.rows, **options)
    plan = plan_batch(config, 1)
    made = grpo_config(grpo_arguments(config, plan, Precision(torch.float32, False, False, True)), config, folder)
    made.steps_per_generation = layout.pieces
    made.algorithm = Algorithm.of(config)
    return made


class LossTrainer(EpisodeTrainer):
    """The real losses; what they need of a trainer is set by hand."""

    def __init__(self, args: GRPOConfig, layout: Layout, total: Any) -> None:
        accelerator = SimpleNamespace(
            num_processes=layout.processes,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            reduce=lambda x, reduction: x,
            sync_gradients=False,
            device=torch.device("cpu"),
            no_sync=nullcontext,
            backward=torch.Tensor.backward,
        )
        vars(self).update(
            args=args, accelerator=accelerator, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
            beta=args.beta, loss_type=args.loss_type, importance_sampling_level=args.importance_sampling_level,
            epsilon_low=args.epsilon, epsilon_high=args.epsilon_high, max_completion_length=args.max_completion_length,
            top_entropy_quantile=args.top_entropy_quantile, off_policy_mask_threshold=None, aux_loss_enabled=False,
            use_vllm=args.use_vllm, vllm_importance_sampling_correction=True, entropy_coef=args.entropy_coef,
            use_adaptive_entropy=False, _entropy_bonus_enabled=args.entropy_coef != 0, num_iterations=layout.iterations,
            current_gradient_accumulation_steps=layout.passes, _step=0, _buffered_inputs=None,
            rows=KeptRows(layout.processes, total), algorithm=vars(args)["algorithm"],
        )  # fmt: skip

    def _get_per_token_logps_and_entropies(self, model: Any, ids: torch.Tensor, _: Any, keep: int, **__: Any) -> Any:
        return *policy_logps(model, ids[:, -keep - 1 : -keep], ids[:, -keep:]), None


def gradient_of_plain_trl(args: GRPOConfig, rows: dict[str, torch.Tensor], items: float | None = None) -> torch.Tensor:
    """TRL's own loss of one micro-batch that is the whole step."""
    count = len(rows["advantages"])
    trainer = LossTrainer(args, Layout(rows=count), None)
    trainer.args.steps_per_generation = 1
    tokens = (rows["completion_mask"] * rows["tool_mask"]).sum() if items is None else torch.tensor(items)
    model = policy()
    GRPOTrainer._compute_loss(trainer, model, rows | {"num_items_in_batch": tokens}).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def take(rows: dict[str, torch.Tensor], which: Any) -> dict[str, torch.Tensor]:
    """Some rows of a batch."""
    return {name: values[which] for name, values in rows.items()}


def gradients_of_steps(
    args: GRPOConfig, layout: Layout, windows: Sequence[dict[str, torch.Tensor]], steps: int
) -> list[torch.Tensor]:
    """What the optimizer gets in each step, as DDP averages it over the processes; the policy stays as it is."""
    args.steps_per_generation = layout.pieces
    processes = [_steps_of_one(args, layout, windows, steps, process)[0] for process in range(layout.processes)]
    return [torch.stack(gradients).mean(0) for gradients in zip(*processes, strict=True)]


def metrics_of_steps(
    args: GRPOConfig, layout: Layout, windows: Sequence[dict[str, torch.Tensor]], steps: int
) -> list[dict[str, float]]:
    """The metrics that the loss adds in each step on a single process, averaged as TRL logs them."""
    args.steps_per_generation = layout.pieces
    return _steps_of_one(args, layout, windows, steps, 0)[1]


def _steps_of_one(
    args: GRPOConfig, layout: Layout, windows: Sequence[dict[str, torch.Tensor]], steps: int, process: int
) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    window: dict[str, torch.Tensor] = {}

    def total(_: torch.Tensor) -> torch.Tensor:
        kept = window[KEPT].view(layout.processes, layout.pieces, layout.rows)
        tokens = (window["completion_mask"] * window["tool_mask"] * window[KEPT].unsqueeze(1)).sum(1).view(kept.shape)
        return torch.stack([*kept.sum((0, 2)), *tokens.sum((0, 2))])

    trainer = LossTrainer(args, layout, total)
    model, gradients, metrics = policy(), [], []
    for step in range(steps):
        for number in range(layout.passes):
            if trainer._step % (layout.pieces * layout.iterations) == 0:
                window = windows[trainer._step // (layout.pieces * layout.iterations)]
                trainer._buffered_inputs = _pieces(window, layout, process)
                trainer.rows.begin_window(trainer._buffered_inputs)
            piece = trainer._buffered_inputs[trainer._step % layout.pieces]
            trainer._compute_loss(model, piece).backward()
            trainer._step += 1
            trainer._end_pass(piece, is_last=number == layout.passes - 1)
        assert model.weight.grad is not None, step
        gradients.append(model.weight.grad.clone())
        model.zero_grad()
        metrics.append({name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()})
        trainer._metrics["train"].clear()
    return gradients, metrics


def _pieces(window: dict[str, torch.Tensor], layout: Layout, process: int) -> list[dict[str, Any]]:
    tokens = (window["completion_mask"] * window["tool_mask"]).sum()
    first = process * layout.pieces * layout.rows
    places = [slice(first + n * layout.rows, first + (n + 1) * layout.rows) for n in range(layout.pieces)]
    return [{**take(window, place), "num_items_in_batch": tokens} for place in places]
