"""The gradient of each loss type is of the rows that are in the loss only, however they are divided into passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aitrain.batch import PassLimit
from aitrain.options.loss_types import LOSS_TYPES
from aitrain.training.passes import KEPT, PASSES, RankRows, in_passes
from tests.training.loss_bench import (
    Layout,
    arguments,
    batch_of,
    gradient_of_plain_trl,
    gradients_of_steps,
    steps_of_process,
    take,
)

ON = {"rl_kl_coef": 0.1, "trl": {"entropy_coef": 0.05}}
"""All terms of a loss."""
LAYOUTS = {
    "passes of several sizes": Layout(rows=8, limit=PassLimit(3)),
    "two processes": Layout(processes=2, rows=8, limit=PassLimit(4)),
    "three processes and two steps": Layout(processes=3, rows=4, steps=2, limit=PassLimit(2)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_a_step_is_that_of_its_kept_rows_however_they_are_shared_out(loss: str, layout: Layout, tmp_path: Path) -> None:
    """A process may have no kept row at all."""
    batch = batch_of(layout.batch, are_ragged=False)
    batch[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(0)) < 0.4
    batch[KEPT][: layout.rows // (1 if layout.processes > 1 else 2)] = False
    batch["advantages"] = batch["advantages"] * batch[KEPT]
    args = arguments(tmp_path, layout, rl_loss_type=loss, **ON)

    for step, gradient in enumerate(gradients_of_steps(args, layout, batch)):
        kept = take(batch, layout.rows_of_step(step) & batch[KEPT])
        torch.testing.assert_close(gradient, gradient_of_plain_trl(args, kept))


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_with_all_rows_kept_the_gradient_is_trls_and_without_any_it_is_nothing(
    loss: str, trims: bool, tmp_path: Path
) -> None:
    rows, layout = batch_of(8, are_ragged=True), Layout(processes=2, rows=4, limit=PassLimit(2), trims=trims)
    args = arguments(tmp_path, layout, rl_loss_type=loss, **ON)
    (ours,) = gradients_of_steps(args, Layout(), rows)
    assert torch.equal(ours, gradient_of_plain_trl(args, rows))

    rows[KEPT][:] = False
    gradients, _, trainer = steps_of_process(args, layout, rows)
    assert torch.equal(gradients[0], torch.zeros_like(gradients[0]))
    assert not trainer.has_kept_rows


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_a_step_are_those_of_its_kept_tokens(level: str, trims: bool, tmp_path: Path) -> None:
    """With one ratio for a completion, the clip ratios are those of its kept completions."""
    layout = Layout(rows=8, steps=2, limit=PassLimit(3), trims=trims)
    batch = batch_of(layout.batch, are_ragged=True)
    batch[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(0)) < 0.6
    args = arguments(tmp_path, layout, rl_loss_type="grpo", rl_importance_level=level, **ON)

    for step, metrics in enumerate(steps_of_process(args, layout, batch)[1]):
        whole = take(batch, layout.rows_of_step(step) & batch[KEPT])
        (wanted,) = steps_of_process(args, Layout(rows=len(whole["advantages"])), whole)[1]
        assert metrics["passes"] > 1 == wanted["passes"]
        for key in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/region_mean", "clip_ratio/high_max"):
            assert metrics[key] == pytest.approx(wanted[key], rel=1e-6), (step, key)


def test_ranks_whose_batches_are_padded_to_other_widths_make_equally_many_passes() -> None:
    """They would wait for each other forever."""

    def of_both(rows: torch.Tensor, _: bool) -> torch.Tensor:
        is_wide = rows.dim() == 2 and rows.shape[1] > 1
        return torch.cat([torch.nn.functional.pad(rows, (0, 10 - rows.shape[1])) if is_wide else rows] * 2)

    passes = []
    for rank, width in enumerate((4, 10)):
        ones = torch.ones(4, width, dtype=torch.long)
        piece = {name: ones.clone() for name in ("completion_ids", "completion_mask", "tool_mask")}
        piece |= {"prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1].clone(), KEPT: torch.ones(4, dtype=torch.bool)}
        (step,) = in_passes([piece], PassLimit(4, 24), False, RankRows(2, rank, of_both))
        passes.append(len(step[PASSES]))
    assert passes[0] == passes[1] > 1
