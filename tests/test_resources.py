"""What a run needs of memory and disk: shapes read from files, estimates, refusals and warnings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.launch import resource_estimate
from aitrain.launch.model_shape import KNOWN, ModelShape, read_model_shape
from aitrain.launch.resource_estimate import (
    MIB,
    DeviceMemory,
    check_resources,
    choose_batch_size,
    estimate_memory,
)
from tests.conftest import write

CPU, GPU = DeviceMemory("CPU", 8 << 30, 16 << 30), DeviceMemory("GPU", 80 << 30, 80 << 30)
TINY_SHAPE = read_model_shape("tiny")
assert TINY_SHAPE is not None


def large() -> ModelShape:
    """Qwen3-0.6B's shape, its linears as one."""
    assert TINY_SHAPE is not None
    (first, *_) = TINY_SHAPE.linears
    return ModelShape(596_049_920, 28, 1024, 3072, 16, 8, 128, 151_936, (first,))


def peak(machine: DeviceMemory = CPU, **options: Any) -> int:
    config = TrainConfig(**options)
    return estimate_memory(large(), config, plan_batch(config, 1), machine).peak


# -- shapes


def header(**tensors: list[int]) -> bytes:
    text = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}).encode()
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
    assert shape is not None
    assert (shape.weights, shape.intermediate, shape.kv_heads, shape.head_dim) == (17, 32, 2, 4)


PUBLISHED = {
    "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Qwen2.5-72B": 72.7,
    "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-3.1-8B": 8.03, "Llama-3.3-70B": 70.6, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "SmolLM2-135M": 0.135, "SmolLM2-360M": 0.362,
    "SmolLM2-1.7B": 1.71, "SmolLM3-3B": 3.08, "Mistral-7B": 7.25, "Mistral-Small-24B": 23.6, "gpt-oss-20b": 20.9,
}  # fmt: skip
"""Billions of weights that the makers state; of Gemma 3, the text part."""
TYPES = {
    "Qwen3": "qwen3", "Qwen2.5": "qwen2", "gemma-3": "gemma3_text", "SmolLM3": "smollm3", "Mistral": "mistral",
    "gpt-oss": "gpt_oss",
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_shape_has_the_weights_of_transformers_own_model_and_those_that_its_maker_states(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, is_tied, *experts = KNOWN[name]
    kind = next((kind for start, kind in TYPES.items() if name.startswith(start)), "llama")
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary, tie_word_embeddings=bool(is_tied),
        pad_token_id=0, **dict(zip(("num_local_experts", "num_experts_per_tok"), experts, strict=False)),
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_model_shape(f"someone/{name}-Instruct-2507")
    assert shape is not None
    assert shape.weights == pytest.approx(model.num_parameters(), rel=1e-3)
    assert shape.weights / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


# -- estimates

TOKENS, TILE = 8 * 1536, 4096 * 32_768 * 2
"""Tokens of a forward pass below, and bytes of the logits that are computed at a time."""
SERVED = {
    "use_vllm": True, "vllm_mode": "server", "rl_max_prompt_length": 512, "rl_max_new_tokens": 1024,
    "rl_prompts_per_step": 32, "rl_num_generations": 8, "batch_size": 8, "rl_kl_coef": 0.0,
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
        # keys and values of 256 completions, activations of 32 prompts, logits
        ("Qwen2.5-0.5B", {"use_vllm": False, "vllm_mode": "colocate"},
         494e6 * (4 + 8 + 2) + 256 * 1536 * 24 * 2 * 128 * 4 + 32 * 512 * 20e3 * 4 + 256 * 151_936 * 16),
    ],
)  # fmt: skip
def test_the_estimate_is_that_of_a_calculation_by_hand(model: str, options: dict[str, Any], expected: float) -> None:
    config = TrainConfig(**{**SERVED, **options})
    shape = read_model_shape(model)
    assert shape is not None
    need = estimate_memory(shape, config, plan_batch(config, config.num_processes or 1), GPU).peak
    assert need == pytest.approx(expected + 700 * MIB, rel=0.06)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("width", ["float32", "bfloat16"])
def test_a_layer_keeps_what_the_estimate_says_for_its_backward_pass(width: str, lora: bool) -> None:
    """Under autocast, which the CPU has, too."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    def kept(layers: int) -> int:
        config = LlamaConfig(
            vocab_size=96, hidden_size=96, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, width))
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")) if lora else model
        sizes: dict[int, int] = {}
        tensors = []  # kept, so that no storage gets the place of another one

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[0] in (2, 128):  # rows, or the tokens of all rows: no weight
                tensors.append(tensor)
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.arange(128).reshape(2, 64) % 96
        mask = ids.ne(0).long()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu"):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        return sum(sizes.values())

    def estimated(layers: int) -> int:
        config = TrainConfig(
            dtype=width, peft=lora, disable_gradient_checkpointing=True, batch_size=2, rl_max_prompt_length=1,
            rl_max_new_tokens=63,
        )  # fmt: skip
        shape = ModelShape(1000, layers, 96, 192, 4, 2, 16, 96, ())
        return estimate_memory(shape, config, plan_batch(config, 1), GPU).phases["training pass"]

    assert estimated(3) - estimated(2) == pytest.approx(kept(3) - kept(2), rel=0.15)


def test_a_colocated_vllm_holds_its_share_during_the_training_pass_unless_it_sleeps() -> None:
    served, awake = peak(GPU, use_vllm=True, vllm_mode="server"), peak(GPU, use_vllm=True)
    assert awake == served + int(0.3 * (80 << 30))
    assert served < peak(GPU, use_vllm=True, vllm_sleep_mode=True) < awake


# -- this machine


def test_what_cannot_fit_is_refused_and_what_is_tight_warned_of_with_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny", batch_size=64, rl_prompts_per_step=16)

    def warnings(**free: int) -> list[str]:
        monkeypatch.setattr(resource_estimate, "free_memory", lambda: free.get("memory", 1 << 40))
        monkeypatch.setattr(resource_estimate, "free_disk", lambda _: free.get("disk", 1 << 40))
        return check_resources(config, plan_batch(config, 1), ())

    assert warnings() == []
    assert "It fits with --batch-size 32." in warnings(memory=900 * MIB)[0]
    assert "--save-total-limit" in warnings(disk=4 * MIB)[0]
    with pytest.raises(ConfigError, match=r"alone need 1 MiB, and the CPU has 1 MiB free.*(?s:.*)--peft"):
        warnings(memory=MIB)
    with pytest.raises(ConfigError, match="--output-dir"):
        warnings(disk=MIB)


# -- the command, and the estimate against the truth


@pytest.mark.slow
def test_the_estimate_of_one_shape_is_within_a_quarter_of_the_real_peak(
    here: Path, preloaded_aitrain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a model takes beyond the libraries, which a training of the tiny model takes, too. glibc gives freed
    blocks back at once, as it does by itself with the large ones of large models."""
    from benchmarks.models import make_model

    callback = """
import re
from pathlib import Path
from transformers import TrainerCallback

class Peak(TrainerCallback):
    def on_train_end(self, args, state, control, **_):
        status = Path("/proc/self/status").read_text()
        Path(__file__).with_name("peak").write_text(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""
    write(here, {"peak.py": callback})
    make_model("10 million weights", here / "model")
    for kind in ("MMAP", "TRIM"):
        monkeypatch.setenv(f"MALLOC_{kind}_THRESHOLD_", "65536")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    estimates, peaks = [], []
    for model in ("tiny", str(here / "model")):
        config = TrainConfig(
            model=model, rl_env=f"{Path(__file__).parent}/gpu/equal_prompts.py:EqualPrompts", rl_prompts_per_step=4,
            rl_num_generations=4, batch_size=8, rl_max_prompt_length=32, rl_max_new_tokens=64, max_steps=2,
            eval_cases=0, save_strategy="no", num_processes=1, custom_callbacks=f"{here}/peak.py:Peak",
        )  # fmt: skip
        (here / "settings.yaml").write_text(json.dumps(config.changed()))
        command = [str(preloaded_aitrain / "aitrain"), "grpo", "--config", "settings.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
        assert done.returncode == 0, done.stderr
        shape = read_model_shape(model)
        assert shape is not None
        config = choose_batch_size(config, 1, shape, CPU)
        estimates.append(estimate_memory(shape, config, plan_batch(config, 1), CPU).peak / MIB)
        peaks.append(int((here / "peak").read_text()) / 1024)

    assert (estimates[1] - estimates[0]) / (peaks[1] - peaks[0]) == pytest.approx(1, abs=0.25)
