"""What a run needs of memory and disk: shapes of models, estimates, refusals and warnings, the size of a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import BatchPlan, plan_batch
from aitrain.launch import resource_estimate
from aitrain.launch.model_shape import KNOWN, ModelShape, read_model_shape
from aitrain.launch.preflight import check
from aitrain.launch.resource_estimate import (
    MIB,
    DeviceMemory,
    ResourceEstimate,
    check_resources,
    choose_batch_size,
    device_memory,
)
from tests.conftest import write, write_nvidia_smi

CPU, GPU = DeviceMemory("CPU", 8 << 30, 16 << 30), DeviceMemory("GPU", 80 << 30, 80 << 30)
TINY, HALF_BILLION = read_model_shape("tiny"), read_model_shape("Qwen/Qwen3-0.6B")


def peak(machine: DeviceMemory, **options: Any) -> int:
    config = TrainConfig(**options)
    return ResourceEstimate(HALF_BILLION, config, plan_batch(config, 1), machine).memory.peak


# -- shapes


def header(**tensors: list[int]) -> bytes:
    text = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    ).encode()
    return len(text).to_bytes(8, "little") + text


SIZES = json.dumps({"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50, "tie_word_embeddings": True})


def test_the_weights_of_shards_are_added_up_without_a_second_copy_of_the_embedding(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    files = {"config.json": SIZES, "model.safetensors.index.json": json.dumps(index)}
    write(
        tmp_path,
        {**files, "one.safetensors": header(a=[3, 4]), "two.safetensors": header(**{"b": [5], "lm_head.weight": [7]})},
    )
    shape = read_model_shape(str(tmp_path))
    assert (shape.weights, shape.intermediate, shape.kv_heads, shape.head_dim) == (17, 32, 2, 4)


def test_experts_take_no_adapter_and_are_idle_in_part_and_quantized_weights_are_not_counted(tmp_path: Path) -> None:
    tensors = {"h.0.experts.down_proj": [4, 8, 4], "h.0.q_proj.weight": [8, 8]}
    sizes = {**json.loads(SIZES), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}

    def read(**more: Any) -> ModelShape | None:
        write(tmp_path, {"config.json": json.dumps(sizes | more), "model.safetensors": header(**tensors)})
        return read_model_shape(str(tmp_path))

    shape = read()
    assert (shape.weights, shape.expert_weights, shape.idle, shape.intermediate) == (192, 2 * 4 * 3 * 8 * 4, 384, 8)
    assert list(shape.matrices) == ["q_proj", "o_proj", "k_proj", "v_proj"]
    assert read(quantization_config={"bits": 4}) is None


PUBLISHED = {
    "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Qwen2.5-72B": 72.7,
    "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-3.1-8B": 8.03, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "SmolLM2-135M": 0.135,
    "SmolLM3-3B": 3.08, "Mistral-7B": 7.25, "gpt-oss-20b": 20.9,
}  # fmt: skip
"""Billions of weights that the makers state; of Gemma 3, the text part."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_shape_has_the_weights_that_its_maker_states(name: str, tmp_path: Path) -> None:
    shape = read_model_shape(f"someone/{name}-Instruct-2507")
    write(tmp_path / name, {"config.json": SIZES})  # as where the tokenizer alone was downloaded
    assert read_model_shape(str(tmp_path / name)) == shape
    assert read_model_shape(f"someone/{name}-bnb-4bit") is None
    assert shape.weights / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


# -- estimates

TOKENS, TILE = 8 * 1536, 4096 * 32_768 * 2
"""Tokens of a forward pass below, and bytes of the logits that are computed at a time."""
SERVED = {
    "use_vllm": True, "vllm_mode": "server", "rl_max_prompt_length": 512, "rl_max_new_tokens": 1024,
    "rl_prompts_per_step": 32, "rl_num_generations": 8, "rl_kl_coef": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        # weights, gradients, two moments and bf16 copies; inputs of 36 layers and one whole layer; embedding and head
        ("Qwen3-4B", {"batch_size": 16},
         4.02e9 * (4 + 4 + 8 + 2) + 2 * TOKENS * (36 * 2560 * 4 + 230e3) + 2 * 151_936 * 2560 * 4 + TILE),
        ("Qwen3-4B", {"dtype": "bfloat16"},
         4.02e9 * (2 + 2 + 4) + TOKENS * (36 * 2560 * 2 + 200e3) + 2 * 151_936 * 2560 * 4 + TILE),
        # all of 32 layers: 18 bytes x hidden, 10 x attention, 8 x MLP, the mask
        ("Llama-3.1-8B", {"peft": True, "disable_gradient_checkpointing": True},
         8.03e9 * 2 + TOKENS * 32 * (18 * 4096 + 10 * 4096 + 8 * 14_336 + 2 * 1536) + TILE),
        # an eighth of the states; embedding, head and two layers gathered, with gradients of the layers
        ("Qwen3-32B", {"distributed_backend": "fsdp2", "num_processes": 8, "batch_size": 1},
         32.8e9 * (4 + 4 + 8) / 8 + 2 * (1.56e9 + 0.98e9) + 4 * 0.98e9 + 1536 * 64 * 5120 * 2 + 2 * 1.56e9 / 2 * 4),
        # keys and values of 256 completions in bf16, activations of 32 prompts, logits
        ("Qwen2.5-0.5B", {"use_vllm": False, "vllm_mode": "colocate"},
         494e6 * (4 + 8 + 2) + 256 * 1536 * 24 * 2 * 128 * 2 + 32 * 512 * 20e3 * 4 + 256 * 151_936 * 16),
    ],
)  # fmt: skip
def test_the_estimate_is_that_of_a_calculation_by_hand(model: str, options: dict[str, Any], expected: float) -> None:
    config = TrainConfig(**{**SERVED, "batch_size": 8, **options})
    batch = plan_batch(config, config.num_processes or 1)
    need = ResourceEstimate(read_model_shape(model), config, batch, GPU).memory.peak
    assert need == pytest.approx(expected + 700 * MIB, rel=0.06)


def test_a_colocated_vllm_holds_its_share_during_the_training_pass_unless_it_sleeps() -> None:
    served, awake = peak(GPU, use_vllm=True, vllm_mode="server"), peak(GPU, use_vllm=True)
    assert awake == served + int(0.3 * (80 << 30))
    assert served < peak(GPU, use_vllm=True, vllm_sleep_mode=True) < awake


# -- this machine


def test_what_cannot_fit_is_refused_and_what_is_tight_warned_of_with_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny", batch_size=64, rl_prompts_per_step=16)

    def warnings(**free: int) -> list[str]:
        monkeypatch.setattr(resource_estimate, "free_disk", lambda _: free.get("disk", 1 << 40))
        device = DeviceMemory("CPU", free.get("memory", 1 << 40))
        return check_resources(ResourceEstimate(TINY, config, plan_batch(config, 1), device))

    assert warnings() == []
    assert "It fits with --batch-size 32." in warnings(memory=900 * MIB)[0]
    assert "--save-total-limit" in warnings(disk=4 * MIB)[0]
    with pytest.raises(ConfigError, match=r"alone need 1 MiB, and the CPU has 1 MiB free.*(?s:.*)--peft"):
        warnings(memory=MIB)


def test_the_memory_is_that_of_the_gpus_of_the_run_without_those_that_say_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "0, NVIDIA H200, 143771, 102000\n1, Other, [N/A], [N/A]"
    write_nvidia_smi(tmp_path, f"echo \"$@\" > {tmp_path}/asked\necho '{told}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert device_memory(["GPU-5a", "1"]) == DeviceMemory("GPU", 102000 * MIB, 143771 * MIB)
    assert "--id=GPU-5a,1" in (tmp_path / "asked").read_text()


# -- the batch size of a run that names none: large passes, of the same completions


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


@pytest.mark.parametrize("total", [8 << 30, 80 << 30])
def test_on_a_gpu_a_pass_is_the_largest_that_leaves_a_fifth_of_the_memory(total: int) -> None:
    device = DeviceMemory("GPU", 0, total)
    options = {**SERVED, "peft": True, "disable_gradient_checkpointing": False}
    chosen = plan(HALF_BILLION, device=device, **options).limit.completions
    assert peak(device, **options, batch_size=chosen) <= 0.8 * total
    assert chosen == 256 or peak(device, **options, batch_size=2 * chosen) > 0.8 * total


@pytest.mark.parametrize(("total", "keeps"), [(8 << 30, False), (40 << 30, True)])
def test_activations_are_kept_where_a_pass_with_a_whole_group_fits(total: int, keeps: bool) -> None:
    options, device = {**SERVED, "peft": True}, DeviceMemory("GPU", 0, total)
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
