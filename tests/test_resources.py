"""What a run needs of memory and disk: shapes read from files, estimates, refusals and warnings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.launch import resource_estimate
from aitrain.launch.model_shape import Linear, ModelShape, read_model_shape
from aitrain.launch.resource_estimate import (
    MIB,
    DeviceMemory,
    MemoryEstimate,
    check_resources,
    choose_batch_size,
    estimate_memory,
    memory_savers,
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


SIZES = json.dumps({"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50})


def test_the_weights_of_shards_are_added_up(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    files = {"config.json": SIZES, "model.safetensors.index.json": json.dumps(index)}
    write(tmp_path, {**files, "one.safetensors": header(a=[3, 4]), "two.safetensors": header(b=[5])})
    shape = read_model_shape(str(tmp_path))
    assert shape is not None
    assert (shape.weights, shape.intermediate, shape.kv_heads, shape.head_dim) == (17, 32, 2, 4)


# -- estimates


def test_more_of_anything_needs_more_and_less_needs_less() -> None:
    for machine in (CPU, GPU):
        usual = peak(machine)
        assert peak(machine, batch_size=64) > usual
        assert peak(machine, rl_max_prompt_length=1024) > usual
        assert peak(machine, rl_kl_coef=0.0) == usual - 4 * large().weights
        assert peak(machine, peft=True, merge_adapter=False) < usual / 2
        assert peak(machine, optimizer="sgd") < usual


def test_memory_savers_are_flags_that_save_what_they_say_the_largest_first() -> None:
    config = TrainConfig(batch_size=8, rl_prompts_per_step=8, disable_gradient_checkpointing=True)
    batch = plan_batch(config, 1)
    found = memory_savers(large(), config, batch, CPU)
    assert found[0][0] == "--peft"
    saved = [much for _, much in found]
    assert saved == sorted(saved, reverse=True)
    assert "--no-disable-gradient-checkpointing" in dict(found)


# -- this machine


def test_what_cannot_fit_is_refused_and_what_is_tight_warned_of_with_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny", batch_size=64, rl_prompts_per_step=16)

    def warnings(**free: int) -> list[str]:
        monkeypatch.setattr(resource_estimate, "free_memory", lambda: free.get("memory", 1 << 40))
        monkeypatch.setattr(resource_estimate, "free_disk", lambda _: free.get("disk", 1 << 40))
        return check_resources(config, plan_batch(config, 1), ())

    assert warnings() == []
    assert "--batch-size 32 saves" in warnings(memory=300 * MIB)[0]
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


# -- sharding


EIGHT_BILLION = ModelShape(
    8_190_735_360, 36, 4096, 12_288, 32, 8, 128, 151_936, (Linear("q_proj", 36 * 8192, 6_945_767_424),)
)


def shares(backend: Any, processes: int = 8, **options: Any) -> MemoryEstimate:
    given = {"use_vllm": True, "vllm_mode": "server", **options}
    config = TrainConfig(distributed_backend=backend, num_processes=processes, **given)
    return estimate_memory(EIGHT_BILLION, config, plan_batch(config, processes), GPU)


def test_sharded_weights_and_states_are_divided_by_the_processes() -> None:
    ddp, fsdp2 = shares("ddp"), shares("fsdp2")

    for part in ("weights", "reference", "optimizer"):
        assert fsdp2.stay[part] == ddp.stay[part] // 8
    assert fsdp2.phases["optimizer's step"] < ddp.phases["optimizer's step"] // 8
    assert fsdp2.peak < 80 << 30 < ddp.peak
