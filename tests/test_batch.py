"""Batch arithmetic: every completion has a place, for any number of processes."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import BatchPlan, PassLimit, plan_batch, schedule_cases

DEFAULTS = TrainConfig()


def plan(processes: int, **options: int) -> BatchPlan:
    """With options that are valid: thousands of plans would take half a minute if each had its own validated."""
    return plan_batch(DEFAULTS.model_copy(update=options), processes)


@pytest.mark.parametrize(
    ("processes", "prompts", "shown"),
    [
        (1, 2, "2 prompts x 4 completions = 8 a step = 1 process x 8, in forward passes of up to 2 completions"),
        (8, 16, "16 prompts x 4 completions = 64 a step = 8 processes x 8, in forward passes of up to 2 completions"),
    ],
)
def test_without_a_word_each_process_adds_its_prompts(processes: int, prompts: int, shown: str) -> None:
    assert plan(processes).prompts_per_step == prompts
    assert str(plan(processes)) == f"{shown}, sorted by length"


NUMBERS = list(product(range(1, 9), range(2, 9), range(1, 9), range(1, 9)))
"""(processes, completions per prompt, batch size, prompts or passes)"""


def test_a_step_has_the_prompts_that_were_asked_for_whatever_the_batch_size() -> None:
    for processes, generations, size, prompts in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size, "rl_prompts_per_step": prompts}
        if prompts * generations % processes:
            with pytest.raises(ConfigError, match="rl_prompts_per_step"):
                plan(processes, **options)
        else:
            made = plan(processes, **options)
            assert (made.prompts_per_step, made.limit) == (prompts, PassLimit(min(size, made.share)))
            assert made.processes * made.share == prompts * generations


def test_a_step_without_prompts_has_the_passes_that_were_asked_for_and_groups_are_never_cut() -> None:
    for processes, generations, size, passes in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size, "gradient_accumulation": passes}
        if processes * size * passes % generations:
            with pytest.raises(ConfigError, match="cannot be divided into groups"):
                plan(processes, **options)
        else:
            made = plan(processes, **options)
            assert made.prompts_per_step * generations == made.completions_per_step == processes * size * passes


def test_every_way_out_that_a_refusal_names_works() -> None:
    for processes, generations, size, prompts in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size}
        for given in ({"rl_prompts_per_step": prompts}, {"gradient_accumulation": prompts}):
            try:
                plan(processes, **options, **given)
            except ConfigError as error:
                way_out = int(re.findall(r"--rl-prompts-per-step (\d+)", str(error))[0])
                for times in (1, 3):
                    assert plan(processes, **options, rl_prompts_per_step=way_out * times)


def test_passes_beside_prompts_must_agree_with_them() -> None:
    with pytest.raises(ConfigError, match="contradict rl_prompts_per_step"):
        plan(1, rl_prompts_per_step=4, gradient_accumulation=3)
    assert plan(2, rl_prompts_per_step=4, gradient_accumulation=4).share == 8


def test_a_pass_holds_as_many_completions_and_tokens_as_the_limits_say() -> None:
    by_rows, by_tokens, by_both = (
        plan(2, rl_prompts_per_step=8, rl_num_generations=4, **more)
        for more in ({"batch_size": 4}, {"tokens_per_pass": 4096}, {"tokens_per_pass": 4096, "batch_size": 3})
    )

    assert by_rows.largest_pass(1000) == (4, 1000)
    assert by_tokens.largest_pass(1000) == (5, 819)
    assert by_tokens.largest_pass(5000) == (1, 5000)
    assert by_both.largest_pass(1000) == (3, 1000)
    assert by_tokens.limit.holds(16, 256)
    assert not by_tokens.limit.holds(16, 257)


@pytest.mark.parametrize(
    "options",
    [
        {"rl_trim_padding": False},
        {"rl_loss_type": "bnpo"},
        {"rl_entropy_coef": 0.1},
        {"trl": {"top_entropy_quantile": 0.5}},
        {"trl": {"deepspeed": "ds.json"}},
    ],
)
def test_padding_is_not_trimmed_where_that_would_train_something_else(options: dict[str, Any]) -> None:
    assert TrainConfig().trims_padding
    assert not plan_batch(TrainConfig(**options), 1).trims


@pytest.mark.parametrize(
    ("options", "updates"),
    [({}, 1), ({"rl_updates_per_rollout": 3}, 3), ({"rl_updates_per_rollout": 2, "trl": {"num_iterations": 2}}, 4)],
)
def test_a_rollout_is_trained_on_for_as_many_steps_as_it_has_updates(options: dict[str, Any], updates: int) -> None:
    config = TrainConfig(**options)
    schedule = schedule_cases(config, plan_batch(config, 1), 10)
    assert (schedule.updates, schedule.prompts) == (updates, 2 * config.rl_updates_per_rollout)
