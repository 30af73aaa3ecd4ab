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


NUMBERS = list(product(range(1, 9), range(2, 9), range(1, 9), range(1, 9)))
"""(processes, completions per prompt, batch size, prompts or passes)"""


@pytest.mark.parametrize("way", ["rl_prompts_per_step", "gradient_accumulation"])
def test_a_step_has_what_was_asked_for_in_whole_groups_or_is_refused_with_a_way_out_that_works(way: str) -> None:
    for processes, generations, size, count in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size}
        completions = count * generations if way == "rl_prompts_per_step" else processes * size * count
        if completions % (processes if way == "rl_prompts_per_step" else generations):
            with pytest.raises(ConfigError, match=r"rl_prompts_per_step|cannot be divided") as caught:
                plan(processes, **options, **{way: count})
            way_out = int(re.findall(r"--rl-prompts-per-step (\d+)", str(caught.value))[0])
            for times in (1, 3):
                assert plan(processes, **options, rl_prompts_per_step=way_out * times)
        else:
            made = plan(processes, **options, **{way: count})
            assert made.prompts_per_step * generations == made.completions_per_step == completions
            assert made.processes * made.share == completions
            assert made.limit == PassLimit(min(size, made.share))


def test_each_process_adds_its_prompts_and_passes_beside_given_ones_must_agree_with_them() -> None:
    assert (plan(1).prompts_per_step, plan(8).prompts_per_step) == (2, 16)
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
    assert by_tokens.passes(1500) == 8
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
    assert not TrainConfig(**options).trims_padding


@pytest.mark.parametrize(
    ("options", "updates"), [({}, 1), ({"rl_updates_per_rollout": 2, "trl": {"num_iterations": 2}}, 4)]
)
def test_a_rollout_is_trained_on_for_as_many_steps_as_it_has_updates(options: dict[str, Any], updates: int) -> None:
    config = TrainConfig(**options)
    schedule = schedule_cases(config, plan_batch(config, 1), 10)
    assert (schedule.updates, schedule.prompts) == (updates, 2 * config.rl_updates_per_rollout)
