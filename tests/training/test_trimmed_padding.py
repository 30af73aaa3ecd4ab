"""Forward passes without padding: which rows share one, and the gradient of a step, which is TRL's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aitrain import Result
from aitrain.batch import PassLimit
from aitrain.training.kept_rows import KEPT
from aitrain.training.micro_batches import PASSES, RankRows, in_passes, micro_batches, padding_share
from aitrain.training.padding import RightAligned
from aitrain.training.pass_plan import padded_tokens, share_passes
from tests.training.loss_bench import (
    LONGEST,
    Layout,
    LossTrainer,
    arguments,
    batch_of,
    gradient_of_plain_trl,
    policy,
    take,
)

Train = Callable[..., Result]
Rows = dict[str, torch.Tensor]
ANY_ORDER = ["grpo", "dr_grpo", "dapo", "luspo"]


# -- which rows share a pass


def lognormal(count: int) -> list[int]:
    """Lengths as in RL: most are short, and some are many times as long."""
    draw = random.Random(0)
    return [min(2048, max(8, int(draw.lognormvariate(6, 1)))) for _ in range(count)]


@pytest.mark.parametrize("limit", [PassLimit(4), PassLimit(8), PassLimit(tokens=8192), PassLimit(tokens=100)], ids=str)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_row_is_in_one_pass_that_is_within_the_limit_and_little_of_it_is_padding(
    limit: PassLimit, processes: int
) -> None:
    lengths = lognormal(96)

    shares = share_passes(lengths, limit, processes)

    assert sorted(row for share in shares for rows in share for row in rows) == list(range(96))
    assert len({len(share) for share in shares}) == 1, "as many passes on each process"
    for rows in (rows for share in shares for rows in share):
        assert limit.holds(len(rows), max(lengths[row] for row in rows))
    totals = [sum(padded_tokens(rows, lengths) for rows in share) for share in shares]
    assert max(totals) - min(totals) <= 2 * max(lengths) * (limit.completions or 2)
    assert sum(totals) <= 1.15 * sum(lengths) < 0.5 * 96 * max(lengths)


# -- the gradient of a step

PROMPT = 3


def padded_batch(count: int, seed: int) -> Rows:
    """Rows of several lengths as TRL pads them: prompts on the left, completions on the right."""
    rows, draw = batch_of(count, are_ragged=False, seed=seed), torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (count, 1), generator=draw)
    lengths = torch.randint(1, LONGEST + 1, (count, 1), generator=draw)
    others = torch.randint(0, 7, (count, PROMPT - 1), generator=draw)
    rows["prompt_ids"] = torch.cat([others, rows["prompt_ids"]], dim=1)
    rows["prompt_mask"] = (torch.arange(PROMPT).flip(0) < prompts).long()
    rows["completion_mask"] = (torch.arange(LONGEST) < lengths).long()
    rows["tool_mask"] = torch.randint(0, 2, (count, LONGEST), generator=draw)
    rows["tool_mask"][:, 0] = 1
    rows["flat"] = torch.tensor(False)
    return rows


def rows_of(batch: Rows, which: Any) -> Rows:
    return take({name: value for name, value in batch.items() if value.dim()}, which)


def gradients_in_passes(
    args: Any, layout: Layout, batch: Rows, limit: PassLimit
) -> tuple[list[torch.Tensor], list[LossTrainer]]:
    """The gradient of each step of one generation batch, as DDP averages it over the processes."""
    tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
    pieces = [
        [
            {**rows_of(batch, slice(first, first + layout.rows)), "flat": batch["flat"], "num_items_in_batch": tokens}
            for first in range(process * layout.rows * layout.pieces, layout.batch, layout.rows)
        ][: layout.pieces]
        for process in range(layout.processes)
    ]
    args.steps_per_generation = layout.pieces
    gradients, trainers = [], []
    for process in range(layout.processes):
        wholes = iter(
            torch.cat([each[step][name] for each in pieces])
            for step in range(layout.pieces)
            for name, value in pieces[0][step].items()
            if value.dim()
        )
        steps = in_passes(pieces[process], limit, RankRows(layout.processes, process, lambda *_: next(wholes)))  # noqa: B023
        trainer = LossTrainer(args, replace(layout, passes=1), None)
        trainer.pass_limit = limit
        of_steps = []
        for step in steps:
            model = policy()
            trainer._compute_loss(model, step).backward()
            of_steps.append(model.weight.grad)
        gradients.append(of_steps)
        trainers.append(trainer)
    return [torch.stack(step).mean(0) for step in zip(*gradients, strict=True)], trainers


LAYOUTS = {
    "two processes": Layout(processes=2, rows=4),
    "three processes and two steps": Layout(processes=3, rows=4, pieces=2),
}
LIMITS = [PassLimit(3), PassLimit(tokens=16)]


@pytest.mark.parametrize("left_out", [False, True], ids=["all", "some left out"])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("loss", [*ANY_ORDER, "gspo"])
def test_a_step_has_the_gradient_of_plain_trl_on_its_padded_rows(
    loss: str, layout: Layout, limit: PassLimit, left_out: bool, tmp_path: Path
) -> None:
    """With the KL term, ratios other than 1, and tokens of the environment."""
    batch = padded_batch(layout.batch, seed=layout.batch)
    if left_out:
        batch[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(1)) < 0.6
        batch["advantages"] = batch["advantages"] * batch[KEPT]
    options = {"rl_loss_type": "grpo", "rl_importance_level": "sequence"} if loss == "gspo" else {"rl_loss_type": loss}
    args = arguments(tmp_path, layout, **options)  # type: ignore[arg-type]

    ours, _ = gradients_in_passes(args, layout, batch, limit)

    kept, items = batch[KEPT], (batch["completion_mask"] * batch["tool_mask"]).sum(1)
    for step, gradient in enumerate(ours):
        place = torch.zeros(layout.processes, layout.pieces, layout.rows, dtype=torch.bool)
        place[:, step] = True
        rows = rows_of(batch, place.flatten() & kept)
        of_step = float(items[kept].sum()) / int(kept.sum()) * len(rows[KEPT])
        wanted = gradient_of_plain_trl(args, rows, of_step)
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_a_step_are_those_of_one_pass_with_all_its_rows(level: str, tmp_path: Path) -> None:
    layout, batch = Layout(rows=12), padded_batch(12, seed=3)
    args = arguments(tmp_path, layout, rl_importance_level=level)

    metrics, wanted = (
        gradients_in_passes(args, layout, batch, limit)[1][0]._metrics["train"] for limit in (LIMITS[0], PassLimit(12))
    )

    assert metrics.keys() == wanted.keys() >= {"kl", "entropy", "clip_ratio/region_mean"}
    assert metrics.pop("passes")[0] > 1 == wanted.pop("passes")[0]
    assert metrics.pop("padding")[0] < wanted.pop("padding")[0]
    for name in metrics:
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-6), name


def test_a_step_without_any_kept_row_has_no_gradient_when_trimmed(tmp_path: Path) -> None:
    layout = Layout(rows=4, processes=2)
    batch = padded_batch(layout.batch, seed=1)
    batch[KEPT][:] = False

    (gradient,), trainers = gradients_in_passes(arguments(tmp_path, layout), layout, batch, LIMITS[0])

    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert all(trainer.rows.has_none for trainer in trainers)


def test_a_pass_has_no_column_that_is_padding_in_all_of_its_rows() -> None:
    batch = padded_batch(8, seed=2)
    (step,) = in_passes([batch], PassLimit(2), RankRows(1, 0, lambda rows, _: rows))

    widths = 0
    for rows, _ in micro_batches(step):
        assert rows["completion_mask"].any(0).all()
        assert {value.shape[1] for name, value in rows.items() if "logps" in name} == {rows["completion_ids"].shape[1]}
        parts = (torch.cat([rows[f"prompt_{part}"], rows[f"completion_{part}"]], 1) for part in ("ids", "mask"))
        aligned = RightAligned.of(*parts)
        assert aligned.mask.sum(1).max() == aligned.mask.shape[1]
        widths += aligned.mask.numel()
    real = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
    assert padding_share(step) == pytest.approx(1 - real / widths)
    assert step[PASSES].sum() == 8


# -- in a training

OPTIONS = {
    "rl_prompts_per_step": 2, "rl_num_generations": 4, "optimizer": "sgd", "lr": 0.1, "max_grad_norm": 0,
    "eval_cases": 0, "rl_kl_coef": 0.1, "rl_max_new_tokens": 12, "max_steps": 4, "scheduler": "constant",
    "rl_check": False,
}  # fmt: skip


class Letters:
    """Prompts of several lengths; some completions have no score."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {'a' * (number % 5 * 3)}:"} for number in range(16)]

    def score_episode(self, completion: str) -> float | None:
        return None if len(completion) % 5 == 0 else sum(letter < "n" for letter in completion) / len(completion)


@pytest.mark.parametrize(
    ("trimming", "options"),
    [
        ({"rl_trim_padding": True}, {"rl_loss_type": "dapo", "trl": {"num_iterations": 2}}),
        pytest.param(
            {"tokens_per_pass": 40}, {"peft": True, "lora_r": 4, "trl": {"generation_batch_size": 16}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all weights, two updates a batch", "an adapter, two steps a batch"],
)  # fmt: skip
def test_a_training_ends_with_the_weights_that_it_has_with_padding(
    trimming: dict[str, Any], options: dict[str, Any], train: Train
) -> None:
    padded, trimmed = (train(Letters(), **OPTIONS, **options, **more) for more in ({}, trimming))

    one, other = (load_file(next(run.folder.glob("model/*.safetensors"))) for run in (padded, trimmed))
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-6
    assert max(line.get("grad_norm", 0) for line in padded.history) > 1e-3
    rewards = [[line.get("reward") for line in run.history] for run in (padded, trimmed)]
    assert rewards[0] == rewards[1]
