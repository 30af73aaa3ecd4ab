"""The batch size of a run that names none: large passes, of the same completions."""

from __future__ import annotations

from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.batch import BatchPlan, plan_batch
from aitrain.launch import resource_estimate
from aitrain.launch.model_shape import ModelShape, read_model_shape
from aitrain.launch.preflight import check
from aitrain.launch.resource_estimate import DeviceMemory, choose_batch_size, estimate_memory

TINY = read_model_shape("tiny")
assert TINY is not None
HALF_BILLION = ModelShape(596_049_920, 28, 1024, 3072, 16, 8, 128, 151_936, TINY.linears[:1])
CPU = DeviceMemory("CPU")


def plan(
    shape: ModelShape | None = TINY,
    processes: int = 1,
    recorded: Any = None,
    device: DeviceMemory = CPU,
    **options: Any,
) -> BatchPlan:
    return plan_batch(choose_batch_size(TrainConfig(**options), processes, shape, device, recorded), processes)


@pytest.mark.parametrize("options", [{}, {"rl_prompts_per_step": 16}, {"rl_prompts_per_step": 3}])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_fits_is_one_pass_with_the_completions_of_before(options: dict[str, Any], processes: int) -> None:
    before = plan_batch(TrainConfig(**options), processes)
    chosen = plan(processes=processes, **options)
    assert chosen.completions_per_step == before.completions_per_step
    assert chosen.limit.completions == chosen.share


@pytest.mark.parametrize("total", [8 << 30, 24 << 30, 80 << 30])
def test_on_a_gpu_a_pass_is_the_largest_that_leaves_a_fifth_of_the_memory(total: int) -> None:
    device = DeviceMemory("GPU", 0, total)
    options: dict[str, Any] = {"rl_prompts_per_step": 32, "rl_num_generations": 8, "rl_max_new_tokens": 1024}
    options |= {"peft": True, "use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://127.0.0.1:8000"}
    options["disable_gradient_checkpointing"] = False

    def peak(size: int) -> int:
        config = TrainConfig(**options, batch_size=size)
        return estimate_memory(HALF_BILLION, config, plan_batch(config, 1), device).peak

    chosen = plan(HALF_BILLION, device=device, **options).limit.completions
    assert peak(chosen) <= 0.8 * total
    assert chosen == 256 or peak(2 * chosen) > 0.8 * total


@pytest.mark.parametrize(("total", "keeps"), [(8 << 30, False), (40 << 30, True)])
def test_activations_are_kept_where_a_pass_with_a_whole_group_fits(total: int, keeps: bool) -> None:
    options: dict[str, Any] = {"rl_prompts_per_step": 32, "rl_num_generations": 8, "rl_max_new_tokens": 1024}
    options |= {"peft": True, "use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://127.0.0.1:8000"}
    device = DeviceMemory("GPU", 0, total)
    chosen = choose_batch_size(TrainConfig(**options), 1, HALF_BILLION, device)
    assert (chosen.disable_gradient_checkpointing, chosen.shares_prompts) == (keeps, True)
    given = TrainConfig(**options, disable_gradient_checkpointing=not keeps)
    assert choose_batch_size(given, 1, HALF_BILLION, device).disable_gradient_checkpointing is not keeps
    resumed = choose_batch_size(TrainConfig(**options), 1, HALF_BILLION, device, chosen.written())
    assert resumed.disable_gradient_checkpointing == keeps


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation": 4},
        {"rl_loss_type": "bnpo"},
        {"rl_entropy_coef": 0.1},
        {"tokens_per_pass": 64},
    ],
)
def test_passes_that_an_option_counts_or_whose_size_changes_the_loss_stay(options: dict[str, Any]) -> None:
    assert plan(**options).limit == plan_batch(TrainConfig(**options), 1).limit


def test_a_resumed_run_has_the_passes_of_its_checkpoint() -> None:
    assert plan(recorded={"batch_size": 4}).limit.completions == 4
    assert plan(recorded={"batch_size": None}).limit.completions == 2


@pytest.mark.usefixtures("here")
def test_a_run_repeated_from_its_options_has_the_same_passes_however_much_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TrainConfig(model="tiny", rl_env="envs.arithmetic", num_processes=2)
    first = check(config)
    monkeypatch.setattr(resource_estimate, "free_memory", lambda: 700 << 20)
    again = check(config)
    replayed = check(TrainConfig(**first.config.written()))
    assert first.batch == again.batch == replayed.batch
    assert first.config.written() == replayed.config.written()
