"""The batch size of a run on the CPU that names none: large passes, of the same completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.batch import BatchPlan, plan_batch
from aitrain.launch import resource_check
from aitrain.launch.cpu_batch import choose_batch_size
from aitrain.launch.model_shape import ModelShape, read_model_shape
from aitrain.launch.preflight import check

TINY = read_model_shape("tiny")
assert TINY is not None
HALF_BILLION = ModelShape(596_049_920, 28, 1024, 3072, 16, 8, 128, 151_936, TINY.linears[:1])


def plan(shape: ModelShape | None = TINY, processes: int = 1, recorded: Any = None, **options: Any) -> BatchPlan:
    return plan_batch(choose_batch_size(TrainConfig(**options), processes, shape, recorded), processes)


@pytest.mark.parametrize(
    "options", [{}, {"rl_prompts_per_step": 16}, {"rl_num_generations": 8}, {"rl_prompts_per_step": 3}]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_fits_is_one_pass_with_the_completions_of_before(options: dict[str, Any], processes: int) -> None:
    before = plan_batch(TrainConfig(**options), processes)
    chosen = plan(processes=processes, **options)
    assert chosen.completions_per_step == before.completions_per_step
    assert chosen.accumulation == 1


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation": 4},
        {"batch_size": 2},
        {"rl_loss_type": "bnpo"},
        {"rl_entropy_coef": 0.1},
        {"rl_trim_padding": True},
        {"trl": {"steps_per_generation": 8}},
    ],
)
def test_passes_that_an_option_counts_or_whose_size_changes_the_loss_have_two_completions(
    options: dict[str, Any],
) -> None:
    assert plan(**options) == plan_batch(TrainConfig(**options), 1)


def test_a_resumed_run_has_the_passes_of_its_checkpoint() -> None:
    assert plan(recorded={"batch_size": 4}).micro_batch == 4
    assert plan(recorded={"batch_size": None}).micro_batch == 2
    assert plan(recorded={"batch_size": 5}, rl_prompts_per_step=4).micro_batch == 16  # of another step


@pytest.mark.parametrize("options", [{}, {"num_processes": 2}])
def test_a_run_repeated_from_its_options_has_the_same_passes_however_much_memory_is_free(
    options: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = check(TrainConfig(model="tiny", rl_env="envs.arithmetic", **options))
    monkeypatch.setattr(resource_check, "free_memory", lambda: 700 << 20)
    again = check(TrainConfig(model="tiny", rl_env="envs.arithmetic", **options))
    replayed = check(TrainConfig.read(first.config.written()))
    assert first.batch.accumulation == 1
    assert first.batch == again.batch == replayed.batch
    assert first.config.written() == replayed.config.written()
