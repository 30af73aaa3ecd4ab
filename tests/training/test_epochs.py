"""Every epoch uses every case once, however the cases are cut into steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from aitrain import Result
from aitrain.batch import CaseSchedule
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.training.batch_source import UniformOrder
from aitrain.training.trl_arguments import fit_warmup
from tests.environments.vowels import Vowels

Train = Callable[..., Result]


@pytest.mark.parametrize(("cases", "prompts", "epochs"), [(10, 4, 1), (7, 4, 3), (8, 4, 2), (3, 4, 5), (5, 12, 1)])
def test_every_epoch_uses_every_case_once(cases: int, prompts: int, epochs: int) -> None:
    plan = CaseSchedule(cases, prompts, 1, epochs)
    stream = UniformOrder(cases, prompts, seed=3)
    order = [case for index in range(plan.batches) for case in stream.batch(index)]
    assert plan.steps == -(-cases * epochs // prompts)
    assert len(order) == plan.steps * prompts == cases * epochs + plan.filled
    assert stream.batch(0) == order[:prompts], "also after a later one"
    for epoch in range(epochs):
        assert Counter(order[epoch * cases : (epoch + 1) * cases]) == Counter(range(cases))


def test_an_epoch_ends_with_the_last_step_on_the_batch_that_has_its_last_case() -> None:
    plan = CaseSchedule(cases=10, prompts=4, updates=2, epochs=3)
    assert [step for step in range(1, plan.steps + 1) if plan.ends_epoch(step)] == [6, 10, 16]
    assert plan.epochs_after(plan.steps) == 3


# -- runs

LEFTOVERS: dict[str, Any] = {
    "max_steps": None, "epochs": 3, "rl_prompts_per_step": 4, "batch_size": 8, "rl_num_generations": 2, "eval_cases": 2,
    "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": None, "rl_max_new_tokens": 4,
}  # fmt: skip
"""10 cases in steps of 4: epochs end after steps 3, 5 and 8."""


def cases_of(folder: Path) -> list[int]:
    """The case of each group that was trained on, in order."""
    lines = [line for file in sorted((folder / "rollouts").glob("*.jsonl")) for line in read_lines(file)]
    return [line["case_idx"] for line in lines if "eval_phase" not in line][::2]


def test_a_run_trains_on_the_leftover_cases_of_each_epoch_and_counts_saves_and_scores_where_epochs_end(
    train: Train,
) -> None:
    result = train(Vowels(10), **LEFTOVERS)
    seen = cases_of(result.folder)
    assert [Counter(seen[n : n + 10]) for n in (0, 10, 20)] == [Counter(range(10))] * 3
    assert (result.steps, len(seen)) == (8, 32)
    epochs = [line["epoch"] for line in result.history if "loss" in line]
    assert epochs == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.0])
    assert [line["step"] for line in result.history if "eval_score" in line] == [3, 5]
    names = sorted(path.name for path in RunFolder(result.folder).checkpoints.iterdir())
    assert names == ["checkpoint-3", "checkpoint-5", "checkpoint-8"]


# -- runs that would train nothing


def arguments_of(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, learning_rate=1e-3, **options)


def test_a_warm_up_is_dropped_where_the_only_step_would_have_no_rate(tmp_path: Path) -> None:
    for steps, warmup in ((1, 0), (3, 0.5)):
        arguments = arguments_of(tmp_path, max_steps=steps, warmup_steps=0.5)
        assert (fit_warmup(arguments) is None) == (steps > 1)
        assert arguments.warmup_steps == warmup
