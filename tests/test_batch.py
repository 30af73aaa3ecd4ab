"""Batch arithmetic: every completion has a place, for any number of processes."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import BatchPlan, plan_batch, schedule_cases

DEFAULTS = TrainConfig()


def plan(processes: int, **options: int) -> BatchPlan:
    """With options that are valid: thousands of plans would take half a minute if each had its own validated."""
    return plan_batch(DEFAULTS.model_copy(update=options), processes)


@pytest.mark.parametrize(
    ("processes", "prompts", "shown"),
    [
        (1, 2, "2 prompts x 4 completions = 8 a step = 1 process x 4 forward passes of 2"),
        (2, 4, "4 prompts x 4 completions = 16 a step = 2 processes x 4 forward passes of 2"),
        (3, 6, "6 prompts x 4 completions = 24 a step = 3 processes x 4 forward passes of 2"),
        (8, 16, "16 prompts x 4 completions = 64 a step = 8 processes x 4 forward passes of 2"),
    ],
)
def test_without_a_word_each_process_adds_its_prompts(processes: int, prompts: int, shown: str) -> None:
    assert plan(processes).prompts_per_step == prompts
    assert str(plan(processes)) == shown


@pytest.mark.parametrize("processes", range(1, 9))
def test_prompts_per_step_mean_the_same_step_for_any_number_of_processes(processes: int) -> None:
    made = plan(processes, rl_prompts_per_step=840, rl_num_generations=4, batch_size=2)

    assert made.prompts_per_step == 840
    assert made.accumulation == 840 * 4 // 2 // processes


NUMBERS = list(product(range(1, 9), range(2, 9), range(1, 9), range(1, 9)))
"""(processes, completions per prompt, batch size, prompts or passes)"""


def test_a_plan_shares_out_exactly_what_was_asked_for() -> None:
    planned = 0
    for processes, generations, size, prompts in NUMBERS:
        try:
            made = plan(processes, rl_num_generations=generations, batch_size=size, rl_prompts_per_step=prompts)
        except ConfigError:
            assert prompts * generations % (processes * size) != 0
            continue
        planned += 1
        assert made.prompts_per_step == prompts
        assert made.processes * made.accumulation * made.micro_batch == prompts * generations
        assert (made.processes, made.micro_batch, made.generations) == (processes, size, generations)
    assert planned > 200


def test_given_passes_are_kept_and_groups_are_never_cut() -> None:
    for processes, generations, size, passes in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size, "gradient_accumulation": passes}
        if processes * size * passes % generations:
            with pytest.raises(ConfigError, match="cannot be divided into groups"):
                plan(processes, **options)
        else:
            made = plan(processes, **options)
            assert made.accumulation == passes
            assert made.prompts_per_step * generations == made.completions_per_step == processes * size * passes


def test_every_way_out_that_a_refusal_names_works() -> None:
    for processes, generations, size, prompts in NUMBERS:
        options = {"rl_num_generations": generations, "batch_size": size}
        for given in ({"rl_prompts_per_step": prompts}, {"gradient_accumulation": prompts}):
            try:
                plan(processes, **options, **given)
            except ConfigError as error:
                said = str(error)
                way_out = int(re.findall(r"--rl-prompts-per-step (\d+)", said)[0])
                for times in (1, 3):
                    assert plan(processes, **options, rl_prompts_per_step=way_out * times)
                for smaller in re.findall(r"--batch-size (\d+)", said):
                    assert plan(processes, **(options | given | {"batch_size": int(smaller)}))


def test_passes_beside_prompts_must_agree_with_them() -> None:
    with pytest.raises(ConfigError, match="which makes it 8"):
        plan(1, rl_prompts_per_step=4, gradient_accumulation=3)
    assert plan(2, rl_prompts_per_step=4, gradient_accumulation=4).accumulation == 4


def test_with_trimmed_padding_a_process_sorts_its_completions_into_passes_of_up_to_the_limit() -> None:
    by_rows, by_tokens = (
        plan(2, rl_prompts_per_step=8, rl_num_generations=4, **more)
        for more in ({"batch_size": 4, "rl_trim_padding": True}, {"tokens_per_pass": 4096})
    )

    assert by_rows.largest_pass(1000) == (4, 1000)
    assert by_tokens.largest_pass(1000) == (5, 819)
    assert by_tokens.largest_pass(5000) == (1, 5000)
    with pytest.raises(ConfigError, match="rl_prompts_per_step"):
        plan(3, rl_prompts_per_step=1, rl_num_generations=4, tokens_per_pass=4096)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tokens_per_pass": 99}, "tokens_per_pass"),
        ({"tokens_per_pass": 99, "rl_prompts_per_step": 2, "batch_size": 2}, "batch_size"),
        ({"rl_trim_padding": True, "rl_loss_type": "bnpo"}, "bnpo"),
        ({"rl_trim_padding": True, "rl_entropy_coef": 0.1}, "--rl-entropy-coef"),
        ({"rl_trim_padding": True, "trl": {"top_entropy_quantile": 0.5}}, "top_entropy_quantile"),
        ({"rl_trim_padding": True, "trl": {"steps_per_generation": 2}}, "steps_per_generation"),
        ({"rl_trim_padding": True, "trl": {"deepspeed": "ds.json"}}, "DeepSpeed"),
    ],
)
def test_trimmed_padding_is_refused_where_it_would_train_something_else(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TrainConfig.read(options)


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, 1), ({"rl_updates_per_rollout": 3}, 3), ({"trl": {"num_iterations": 2}}, 2),
        ({"trl": {"steps_per_generation": 2}}, 1), ({"trl": {"steps_per_generation": 6}}, 3),
    ],
)  # fmt: skip
def test_a_window_ends_where_a_step_begins_with_a_new_rollout(options: dict[str, Any], window: int) -> None:
    config = TrainConfig(**options)
    assert schedule_cases(config, plan_batch(config, 1), 10).window == window
