"""The loss: each formula that aitrain adds against numbers worked out by hand, and each gradient against TRL's, of the
rows that are in the loss only, however they are divided into passes and over ranks."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aitrain import ConfigError, EnvironmentFailed, TrainConfig
from aitrain.batch import PassLimit
from aitrain.options.algorithms import ALGORITHMS
from aitrain.training.algorithm import (
    AlgorithmParts,
    has_advantages,
)
from aitrain.training.passes import KEPT, cost_of_passes, passes_of, plan_passes, share_blocks
from tests.conftest import write
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, rollouts
from tests.training.loss_bench import (
    LONGEST,
    Layout,
    Rows,
    arguments,
    batch_of,
    gradient_of_plain_trl,
    gradients_of_steps,
    steps_of_process,
    take,
)

Tensor = torch.Tensor
NONE = math.nan
CLIPPED = """
import torch

def clipped(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

def squared(logprobs, old_logprobs, advantages, **rest):
    return -torch.exp(logprobs - old_logprobs) * advantages.abs() * advantages

def scalar(logprobs):
    return logprobs.sum()

def broken(logprobs):
    return logprobs / [1]

def unknown(logits, mask): ...
"""


# -- formulas


def test_equal_scores_have_no_advantage_though_their_mean_is_rounded() -> None:
    rewards = torch.cat([torch.full((8,), 0.1), torch.linspace(0, 1, 8)])
    groups = rewards.view(-1, 8)
    of_trl = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    advantages = AlgorithmParts.of(TrainConfig()).advantages(rewards, 8, of_trl[4:], slice(4, 16))

    assert of_trl[0] != 0
    assert has_advantages(rewards, torch.ones(16), 8).tolist() == [False, True]
    assert advantages.tolist() == [0.0] * 4 + of_trl[8:].tolist()


@pytest.mark.parametrize(("longest", "penalty"), [(80, 0.0), (90, 0.5), (95, 0.75), (100, 1.0), (0, 0.0)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(longest: int, penalty: float) -> None:
    config = TrainConfig(rl_max_new_tokens=100, rl_overlong_buffer=20)
    assert AlgorithmParts.of(config).penalty(longest) == pytest.approx(penalty)


# -- the rows that are in the loss

ON = {"rl_kl_coef": 0.1, "rl_entropy_coef": 0.05}
"""All terms of a loss."""
LAYOUTS = {
    "passes of several sizes": Layout(rows=8, limit=PassLimit(3)),
    "two processes": Layout(processes=2, rows=8, limit=PassLimit(4)),
    "three processes and two steps": Layout(processes=3, rows=4, steps=2, limit=PassLimit(2)),
    "two processes, trimmed": Layout(processes=2, rows=8, limit=PassLimit(3), trims=True),
    "three processes, two steps, trimmed": Layout(processes=3, rows=4, steps=2, limit=PassLimit(100, 16), trims=True),
}
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


@pytest.mark.parametrize(
    ("loss", "layout"),
    [(loss, name) for loss in ALGORITHMS for name, layout in LAYOUTS.items()
     if not layout.trims or TrainConfig(rl_loss_type=loss).trims_padding],
)  # fmt: skip
def test_a_step_is_that_of_its_kept_rows_however_they_are_shared_out(loss: str, layout: str, tmp_path: Path) -> None:
    """A process may have no kept row at all, advantages may be 0; where padding is trimmed, rows have several lengths,
    and tokens of the environment."""
    shared_out = LAYOUTS[layout]
    count, trims = shared_out.batch, shared_out.trims
    batch = padded_batch(count, seed=count) if trims else batch_of(count, are_ragged=False)
    batch[KEPT] = torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.5
    batch[KEPT][: shared_out.rows // (1 if shared_out.processes > 1 else 2)] = False
    batch["advantages"] = (batch["advantages"] * batch[KEPT]).where(batch["advantages"] > -0.5, 0.0)
    args = arguments(tmp_path, shared_out, rl_loss_type=loss, **({} if trims else ON))

    kept, items = batch[KEPT], (batch["completion_mask"] * batch["tool_mask"]).sum(1)
    for step, gradient in enumerate(gradients_of_steps(args, shared_out, batch)):
        rows = take(batch, shared_out.rows_of_step(step) & kept)
        of_step = float(items[kept].sum()) / int(kept.sum()) * len(rows[KEPT])
        wanted = gradient_of_plain_trl(args, rows, of_step)
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("kl", "flat", "passes"), [(0.0, 6, 1), (0.0, 8, 3), (0.1, 6, 3)])
def test_completions_without_an_advantage_are_left_out_where_the_loss_is_0_without_one(
    kl: float, flat: int, passes: int, tmp_path: Path
) -> None:
    """In a step without any advantage they are not, for the metrics."""
    layout, rows = Layout(rows=8, limit=PassLimit(3), trims=True), batch_of(8, are_ragged=True)
    rows["advantages"][:flat] = 0
    args = arguments(tmp_path, layout, rl_kl_coef=kl)
    assert steps_of_process(args, layout, rows)[1][0]["passes"] == passes


def test_rows_without_an_advantage_are_in_no_metric_where_they_fill_up_a_pass(tmp_path: Path) -> None:
    layout, rows = Layout(processes=2, rows=2, limit=PassLimit(1), trims=True), batch_of(4, are_ragged=True)
    rows["advantages"][1:] = rows["completion_mask"][1:, 1:] = 0  # one token, which TRL counts also if it is masked
    args = arguments(tmp_path, layout, rl_kl_coef=0.0)
    first, second = (steps_of_process(args, layout, rows, process)[1][0] for process in range(2))

    alone = steps_of_process(args, Layout(rows=1), take(rows, slice(1)))[1][0]
    assert first["entropy"] == pytest.approx(alone["entropy"])
    assert math.isnan(second["entropy"])
    rows[KEPT][:] = False
    assert math.isnan(steps_of_process(args, layout, rows)[1][0]["entropy"])


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_metrics_of_a_step_are_those_of_its_kept_tokens(loss: str, trims: bool, tmp_path: Path) -> None:
    """With one ratio for a completion, the clip ratios are those of its kept completions."""
    layout = Layout(rows=8, steps=2, limit=PassLimit(3), trims=trims)
    batch = batch_of(layout.batch, are_ragged=True)
    batch[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(0)) < 0.6
    args = arguments(tmp_path, layout, rl_loss_type=loss, **ON)

    for step, metrics in enumerate(steps_of_process(args, layout, batch)[1]):
        whole = take(batch, layout.rows_of_step(step) & batch[KEPT])
        (wanted,) = steps_of_process(args, Layout(rows=len(whole["advantages"])), whole)[1]
        assert metrics["passes"] > 1 == wanted["passes"]
        for key in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/region_mean", "clip_ratio/high_max"):
            assert metrics[key] == pytest.approx(wanted[key], rel=1e-6), (step, key)


def test_ranks_whose_batches_are_padded_to_other_widths_make_equally_many_passes() -> None:
    """They would wait for each other forever."""

    def padded(rows: torch.Tensor, dim: int, pad_first: bool) -> torch.Tensor:
        is_wide = rows.dim() == 2 and rows.shape[1] > 1
        return torch.nn.functional.pad(rows, (0, 10 - rows.shape[1])) if is_wide else rows

    passes = []
    for rank, width in enumerate((4, 10)):
        ones = torch.ones(4, width, dtype=torch.long)
        piece = {name: ones.clone() for name in ("completion_ids", "completion_mask", "tool_mask")}
        piece |= {"prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1].clone(), KEPT: torch.ones(4, dtype=torch.bool)}
        piece["num_items_in_batch"] = torch.tensor(float(width))
        ranks: Any = SimpleNamespace(
            num_processes=2,
            process_index=rank,
            pad_across_processes=padded,
            gather=lambda rows: torch.cat([rows, rows]) if rows.dtype == torch.bool else torch.tensor([5, 11]),
        )
        passes.append(len(passes_of(piece, PassLimit(4, 24), False, ranks).rows))
    assert passes[0] == passes[1] > 1


# -- gradients


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_trls_loss_as_a_custom_loss_has_the_gradient_of_trl(loss: str, here: Path) -> None:
    """With one ratio for a completion that is so of the KL term, as this custom loss takes one for each token."""
    write(here, {"loss.py": CLIPPED})
    rows, layout = batch_of(8, are_ragged=True), Layout(rows=8)
    rows["advantages"] *= loss != "gspo"
    options: dict[str, Any] = {
        "rl_loss_type": loss, "rl_kl_coef": 0.2, "rl_entropy_coef": 0.05,
        "rl_clip_range": 0.2, "rl_clip_range_high": 0.2,
    }  # fmt: skip
    custom = arguments(here, layout, custom_loss="loss.py:clipped", **options)
    (ours,), (metrics,) = steps_of_process(custom, layout, rows)

    torch.testing.assert_close(ours, gradient_of_plain_trl(arguments(here, layout, **options), rows))
    assert metrics.keys() == {"kl", "entropy", "passes"}  # no clip ratios, which the loss alone knows


@pytest.mark.parametrize("loss", ["dr_grpo", "dapo"])
def test_a_step_with_a_custom_loss_is_that_of_its_kept_rows(loss: str, here: Path) -> None:
    """On two ranks, also if a micro-batch has no such row, and the loss is not linear in the advantages."""
    write(here, {"loss.py": CLIPPED})
    layout = LAYOUTS["two processes"]
    rows = batch_of(layout.batch, are_ragged=False)
    rows[KEPT] = torch.rand(layout.batch, generator=torch.Generator().manual_seed(1)) < 0.5
    rows[KEPT][: layout.rows] = False
    rows["advantages"] = rows["advantages"] * rows[KEPT]
    parts: dict[str, Any] = {"rl_loss_type": loss, "rl_entropy_coef": 0.05, "custom_loss": "loss.py:squared"}

    (ours,) = gradients_of_steps(arguments(here, layout, **parts), layout, rows)
    kept = take(rows, rows[KEPT])
    alone = Layout(rows=len(kept[KEPT]))
    (wanted,) = gradients_of_steps(arguments(here, alone, **parts), alone, kept)

    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(ours, wanted)


# -- rewards

CALLBACKS = """
from transformers import TrainerCallback

def stops():
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            control.should_evaluate = state.global_step == 1
            control.should_epoch_stop = state.global_step == 2

        def on_log(self, args, state, control, **rest):
            control.should_evaluate = True

        on_epoch_end = on_log
    return Stops()
"""


def test_penalties_are_subtracted_from_rewards_before_the_advantages_and_custom_callbacks_are_called(
    train: Train, here: Path
) -> None:
    write(here, {"mine.py": CALLBACKS})
    result = train(
        Vowels(),
        custom_callbacks="mine.py:stops",
        max_steps=3,
        rl_overlong_buffer=6,
        rl_stop=list("aeiou0123456789"),
    )
    assert (result.status, result.steps) == ("stopped", 2)
    assert "eval_score" in result.history[0]
    records = rollouts(result)[:8]  # of the first step
    lengths = torch.tensor([record["tokens"] for record in records])
    scores = torch.tensor([record["score"] for record in records])
    rewards = scores - lengths / 6
    groups = rewards.view(-1, 4)
    expected = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    assert [record["advantage"] for record in records] == pytest.approx(expected, abs=1e-5)
    assert len(set(lengths.tolist())) > 1
    line = result.history[1]
    assert line["penalty/overlong"] == pytest.approx(float((lengths / 6).mean()))
    assert (line["reward"], line["reward_std"]) == pytest.approx((float(scores.mean()), float(scores.std())))


# -- functions of the user's


def test_a_custom_loss_that_cannot_be_used_is_refused_with_what_there_is(here: Path) -> None:
    write(here, {"loss.py": CLIPPED})

    def loss(name: str) -> Tensor:
        custom = AlgorithmParts.of(TrainConfig(custom_loss=f"loss.py:{name}")).custom_loss
        assert custom is not None
        return custom(torch.ones(2, 3), logprobs=torch.zeros(2, 3))

    with pytest.raises(ConfigError, match=r"argument: 'logits'\nIt may ask for: logprobs,"):
        loss("unknown")
    with pytest.raises(EnvironmentFailed, match=r"tensor of \(2, 3\)"):
        loss("scalar")
    with pytest.raises(EnvironmentFailed, match=r"TypeError.*\nat .*loss.py, line 15, in broken"):
        loss("broken")


PAGE = Path(__file__).parents[2] / "docs/extending.md"


def test_an_algorithm_trains_on_the_advantages_that_its_class_returns(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(
        r"^```python file=best_of_group.py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    defined: dict[str, Any] = {}
    exec(found[1], defined)
    monkeypatch.setitem(ALGORITHMS, "dapo", defined["best"])

    result = train(Vowels(), rl_loss_type="dapo", max_steps=2, eval_cases=0)
    groups = defaultdict(list)
    for record in rollouts(result):
        groups[record["step"], record["group"]].append((record["score"], record["advantage"]))
    assert len(groups) > 2
    for group in groups.values():
        best = max(score for score, _ in group)
        assert [advantage for _, advantage in group] == [float(score == best) for score, _ in group]


# -- passes without padding


@given(
    lengths=st.lists(st.integers(1, 500), min_size=12, max_size=12),
    limit=st.sampled_from([PassLimit(4), PassLimit(8), PassLimit(96, 900)]),
    processes=st.integers(1, 3),
)
def test_every_row_is_in_one_pass_that_is_within_the_limit(
    lengths: list[int], limit: PassLimit, processes: int
) -> None:
    passes = [[rows] for rows in plan_passes(list(range(12)), lengths, limit)]
    shares = [
        [rows for (rows,) in blocks]
        for blocks in share_blocks(passes, processes, lambda block: cost_of_passes(block, lengths)) or ()
    ]

    assert sorted(row for share in shares for rows in share for row in rows) == list(range(12))
    assert len({len(share) for share in shares}) == 1, "as many passes on each process"
    for rows in (rows for share in shares for rows in share):
        assert limit.holds(len(rows), max(lengths[row] for row in rows))
