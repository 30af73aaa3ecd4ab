"""Forward passes without padding: which rows share one, and the gradient of a step, which is TRL's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aitrain import Result
from aitrain.batch import PassLimit
from aitrain.training import passes
from aitrain.training.passes import KEPT, padded_tokens, share_passes
from tests.training.conftest import difference
from tests.training.loss_bench import (
    LONGEST,
    Layout,
    Rows,
    arguments,
    batch_of,
    gradient_of_plain_trl,
    gradients_of_steps,
    take,
)

Train = Callable[..., Result]
ANY_ORDER = ["grpo", "dr_grpo", "dapo", "luspo"]


# -- which rows share a pass


def lognormal(count: int) -> list[int]:
    """Lengths as in RL: most are short, and some are many times as long."""
    draw = random.Random(0)
    return [min(2048, max(8, int(draw.lognormvariate(6, 1)))) for _ in range(count)]


@pytest.mark.parametrize("limit", [PassLimit(4), PassLimit(8), PassLimit(96, 8192), PassLimit(96, 100)], ids=str)
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
    assert max(totals) - min(totals) <= 2 * max(lengths) * min(limit.completions, 8)
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


LAYOUTS = {
    "two processes": Layout(processes=2, rows=4, trims=True),
    "three processes and two steps": Layout(processes=3, rows=4, steps=2, trims=True),
}
LIMITS = [PassLimit(3), PassLimit(100, 16)]


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

    ours = gradients_of_steps(args, replace(layout, limit=limit), batch)

    kept, items = batch[KEPT], (batch["completion_mask"] * batch["tool_mask"]).sum(1)
    for step, gradient in enumerate(ours):
        rows = take(batch, layout.rows_of_step(step) & kept)
        of_step = float(items[kept].sum()) / int(kept.sum()) * len(rows[KEPT])
        wanted = gradient_of_plain_trl(args, rows, of_step)
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


# -- in a training


class Letters:
    """Prompts of several lengths; some completions have no score."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {'a' * (number % 5 * 9)}:"} for number in range(16)]

    def score_episode(self, completion: str) -> float | None:
        return None if len(completion) % 5 == 0 else sum(letter < "n" for letter in completion) / len(completion)


def test_a_training_ends_with_the_weights_that_it_has_with_padding_and_rows_apart(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two updates a batch, and prompts and completions of several lengths."""
    monkeypatch.setattr(passes, "LEAST_GAIN", -math.inf)  # however short the prompts are
    options = {
        "rl_prompts_per_step": 2, "optimizer": "sgd", "lr": 0.1, "max_grad_norm": 0, "eval_cases": 0, "rl_kl_coef": 0.1,
        "rl_max_new_tokens": 12, "max_steps": 4, "scheduler": "constant", "rl_loss_type": "dapo",
        "trl": {"num_iterations": 2},
    }  # fmt: skip
    padded, trimmed = (train(Letters(), **options, **more) for more in ({"rl_trim_padding": False}, {"batch_size": 3}))

    assert difference(padded.model, trimmed.model) < 1e-6
    assert max(line.get("grad_norm", 0) for line in padded.history) > 1e-3
    rewards = [[line["reward"] for line in run.history if "reward" in line] for run in (padded, trimmed)]
    assert rewards[0] == rewards[1]
    wasted = [max(line.get("padding", 0) for line in run.history) for run in (padded, trimmed)]
    assert wasted[1] < 0.5 * wasted[0]
