"""The gradient of each loss type is of the rows that are in the loss only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aitrain.options.loss_types import LOSS_TYPES
from aitrain.training.kept_rows import KEPT
from tests.training.loss_bench import (
    Layout,
    arguments,
    batch_of,
    gradient_of_plain_trl,
    gradients_of_steps,
    metrics_of_steps,
    take,
)

Tensor = torch.Tensor
ON = {"rl_kl_coef": 0.1, "trl": {"entropy_coef": 0.05}}
"""All terms of a loss."""


LAYOUTS = {
    "accumulation": Layout(passes=4, pieces=4, rows=2),
    "two processes and accumulation": Layout(processes=2, passes=2, pieces=2, rows=4),
    "a window of two steps": Layout(passes=2, pieces=4, rows=4),
    "two iterations": Layout(passes=2, pieces=2, rows=4, iterations=2),
    "two windows a step": Layout(passes=4, pieces=2, rows=4),
    "steps across windows, on two processes": Layout(processes=2, passes=2, pieces=3, rows=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_a_step_is_that_of_its_kept_rows_however_they_are_shared_out(loss: str, layout: Layout, tmp_path: Path) -> None:
    """A micro-batch and a process may have no kept row at all."""
    windows = [batch_of(layout.batch, are_ragged=False, seed=seed) for seed in range(6)]
    for number, window in enumerate(windows):
        window[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(number)) < 0.4
        window[KEPT][: layout.rows] = False
        window["advantages"] = window["advantages"] * window[KEPT]
    args = arguments(tmp_path, layout, rl_loss_type=loss, **ON)
    steps = 3

    ours = gradients_of_steps(args, layout, windows, steps)

    for step, gradient in enumerate(ours):
        kept = _kept_rows_of(step, layout, windows)
        torch.testing.assert_close(gradient, gradient_of_plain_trl(args, kept))


def _kept_rows_of(step: int, layout: Layout, windows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    parts = []
    for number in range(step * layout.passes, (step + 1) * layout.passes):
        window = windows[number // (layout.pieces * layout.iterations)]
        place = torch.zeros(layout.processes, layout.pieces, layout.rows, dtype=torch.bool)
        place[:, number % layout.pieces] = True
        parts.append(take(window, place.flatten() & window[KEPT]))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_with_all_rows_kept_the_gradient_is_trls_and_without_any_it_is_nothing(loss: str, tmp_path: Path) -> None:
    rows, layout = batch_of(8, are_ragged=True), Layout(passes=2, pieces=2, rows=4)
    args = arguments(tmp_path, Layout(), rl_loss_type=loss, **ON)
    (ours,) = gradients_of_steps(args, Layout(), [rows], steps=1)
    assert torch.equal(ours, gradient_of_plain_trl(args, rows))

    rows[KEPT][:] = False
    (gradient,) = gradients_of_steps(arguments(tmp_path, layout, rl_loss_type=loss, **ON), layout, [rows], steps=1)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["accumulation", "a window of two steps", "two iterations", "two windows a step"])
def test_metrics_of_a_step_are_those_of_its_kept_tokens(name: str, level: str, tmp_path: Path) -> None:
    """With one ratio for a completion, the clip ratios are those of its kept completions."""
    layout = LAYOUTS[name]
    windows = [batch_of(layout.batch, are_ragged=True, seed=seed) for seed in range(6)]
    for number, window in enumerate(windows):
        window[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(number)) < 0.4
        window[KEPT][-1] = True
    windows[0][KEPT][: layout.rows] = True  # a micro-batch of which all rows are kept
    args = arguments(tmp_path, layout, rl_loss_type="grpo", rl_importance_level=level, **ON)

    for step, metrics in enumerate(metrics_of_steps(args, layout, windows, steps=3)):
        whole = _kept_rows_of(step, layout, windows)
        (wanted,) = metrics_of_steps(args, Layout(rows=len(whole["advantages"])), [whole], steps=1)
        for key in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/region_mean"):
            assert metrics[key] == pytest.approx(wanted[key], rel=1e-6), (step, key)
