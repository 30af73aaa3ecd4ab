"""What a run needs of memory and disk: shapes read from files, estimates, refusals and warnings."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.cli.grpo import plan_lines
from aitrain.launch import resource_check
from aitrain.launch.model_shape import Linear, ModelShape, read_model_shape
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.resource_check import check_resources, device_memory, free_disk
from aitrain.launch.resource_estimate import (
    MIB,
    DeviceMemory,
    MemoryEstimate,
    estimate_disk,
    estimate_memory,
    memory_savers,
)
from aitrain.runs.run_folder import RunFolder
from tests.conftest import Run, write

plan_command = importlib.import_module("aitrain.cli.plan")  # the package has the command by this name
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


def test_the_shape_of_the_tiny_model_is_read_from_its_header() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from aitrain.training.model import TINY_MODEL

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    assert TINY_SHAPE is not None
    assert TINY_SHAPE.weights == sum(parameter.numel() for parameter in model.parameters())
    assert (TINY_SHAPE.layers, TINY_SHAPE.hidden, TINY_SHAPE.vocabulary) == (2, 128, model.config.vocab_size)
    linears = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][:-1]
    assert sum(linear.weights for linear in TINY_SHAPE.linears) == sum(linear.weight.numel() for linear in linears)
    assert {linear.name for linear in TINY_SHAPE.linears} >= {"q_proj", "down_proj"}


def header(**tensors: list[int]) -> bytes:
    text = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}).encode()
    return len(text).to_bytes(8, "little") + text


SIZES = json.dumps({"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50})


def test_shards_are_added_up_and_a_missing_one_leaves_the_shape_unknown(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    files = {"config.json": SIZES, "model.safetensors.index.json": json.dumps(index)}
    write(tmp_path, {**files, "one.safetensors": header(a=[3, 4]), "two.safetensors": header(b=[5])})
    shape = read_model_shape(str(tmp_path))
    assert shape is not None
    assert (shape.weights, shape.intermediate, shape.kv_heads, shape.head_dim) == (17, 32, 2, 4)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": SIZES},
        {"config.json": "{", "model.safetensors": header(a=[1])},
        {"config.json": "{}", "model.safetensors": header(a=[1])},
        {"config.json": SIZES, "model.safetensors": b"\xff" * 8},
        {"config.json": SIZES, "model.safetensors": b"\x05\0\0\0\0\0\0\0[1,2]"},
    ],
)
def test_what_cannot_be_read_is_unknown(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, files)
    assert read_model_shape(str(tmp_path)) is None


def test_a_model_of_the_hub_is_looked_up_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_model_shape("some/model") is None
    snapshot = "models--some--model/snapshots/abc/"
    write(tmp_path, {"models--some--model/refs/main": "abc\n", snapshot + "config.json": SIZES,
                     snapshot + "model.safetensors": header(a=[2, 2])})  # fmt: skip
    shape = read_model_shape("some/model")
    assert shape is not None
    assert shape.weights == 4


# -- estimates


def test_more_of_anything_needs_more_and_less_needs_less() -> None:
    for machine in (CPU, GPU):
        usual = peak(machine)
        assert peak(machine, batch_size=64) > usual
        assert peak(machine, rl_max_prompt_length=1024) > usual
        rows = {"batch_size": 64, "gradient_accumulation": 1}  # generation, which has no gradients, is smaller then
        assert peak(machine, **rows, disable_gradient_checkpointing=True) > peak(machine, **rows)
        assert peak(machine, rl_kl_coef=0.0) == usual - 4 * large().weights
        assert peak(machine, peft=True, merge_adapter=False) < usual / 2
        assert peak(machine, optimizer="sgd", rl_kl_coef=0.0) < peak(machine, rl_kl_coef=0.0)


def test_memory_savers_are_flags_that_save_what_they_say_the_largest_first() -> None:
    config = TrainConfig(batch_size=8, rl_prompts_per_step=8, disable_gradient_checkpointing=True)
    batch = plan_batch(config, 1)
    found = memory_savers(large(), config, batch, CPU)
    assert found[0][0] == "--peft"
    saved = [much for _, much in found]
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > 0
    flags = " ".join(flag for flag, _ in found)
    assert "--no-disable-gradient-checkpointing" in flags
    assert "--batch-size 4 --rl-prompts-per-step 8" in flags
    less = config.model_copy(update={"batch_size": 4})
    after = estimate_memory(large(), less, plan_batch(less, 1), CPU).peak
    before = estimate_memory(large(), config, batch, CPU).peak
    assert dict(found)["--batch-size 4 --rl-prompts-per-step 8"] == before - after


def test_the_memory_of_a_pass_is_that_of_its_tokens_and_at_least_of_the_longest_episode() -> None:
    every = {"rl_prompts_per_step": 8, "rl_max_new_tokens": 1024, "disable_gradient_checkpointing": True}

    def of(tokens: int) -> int:
        return peak(GPU, tokens_per_pass=tokens, **every)

    assert of(16384) > of(8192) > of(1280) == of(100)
    config = TrainConfig(tokens_per_pass=16384, **every)
    savers = dict(memory_savers(large(), config, plan_batch(config, 1), GPU))
    assert savers["--tokens-per-pass 8192"] == of(16384) - of(8192)


def test_the_disk_holds_one_checkpoint_more_than_is_kept() -> None:
    batch = plan_batch(TrainConfig(), 1)
    one = estimate_disk(large(), TrainConfig(save_total_limit=1), batch).checkpoints // 2
    assert one == 3 * 4 * large().weights
    assert estimate_disk(large(), TrainConfig(save_total_limit=3), batch).checkpoints == 4 * one
    assert estimate_disk(large(), TrainConfig(save_strategy="no"), batch).checkpoints == 0


# -- this machine


def test_free_memory_is_what_the_system_and_the_container_leave() -> None:
    free, total = device_memory(()).free, device_memory(()).total
    assert free is not None
    assert total is not None
    assert 0 < free <= total


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") > 0


def test_weights_that_do_not_fit_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny")
    monkeypatch.setattr(resource_check, "free_memory", lambda: MIB)
    with pytest.raises(
        ConfigError, match=r"weights of tiny alone need 1 MiB, and the CPU has 1 MiB free.*(?s:.*)--peft"
    ):
        check_resources(config, plan_batch(config, 1), ())


def test_memory_that_is_tight_is_a_warning_with_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny", batch_size=64, rl_prompts_per_step=16)
    monkeypatch.setattr(resource_check, "free_memory", lambda: 300 * MIB)
    (warning,) = check_resources(config, plan_batch(config, 1), ())
    assert "300 MiB are free" in warning
    assert "--batch-size 32 --rl-prompts-per-step 16 saves" in warning
    monkeypatch.setattr(resource_check, "free_memory", lambda: 1 << 40)
    assert check_resources(config, plan_batch(config, 1), ()) == ()


def test_a_disk_that_cannot_hold_the_model_is_refused_and_one_for_few_checkpoints_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TrainConfig(model="tiny")
    monkeypatch.setattr(resource_check, "free_disk", lambda _: MIB)
    with pytest.raises(ConfigError, match="output_dir: the trained model alone needs"):
        check_resources(config, plan_batch(config, 1), ())
    monkeypatch.setattr(resource_check, "free_disk", lambda _: 4 * MIB)
    (warning,) = check_resources(config, plan_batch(config, 1), ())
    assert "--save-total-limit" in warning


# -- the command, and the estimate against the truth


def test_the_plan_shows_batch_memory_disk_and_time(here: Path, preloaded_aitrain: Path) -> None:
    named = ["--model", "tiny", "--rl-env", "envs.arithmetic", "--rl-prompts-per-step", "6", "--max-steps", "7"]
    command = [str(preloaded_aitrain / "aitrain"), "plan", *named]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    lines = {line[:12].strip(): line[13:] for line in done.stdout.splitlines() if line[:12].strip()}
    assert lines["batch"] == "6 prompts x 4 completions = 24 a step = 1 process x 1 forward pass of 24"
    assert lines["shape"] == "0.4 million weights: 2 layers of 128, 259 tokens"
    assert re.match(r"about \d+ MiB of the CPU's, [\d.]+ GiB free; prompts of 256 ", lines["memory"])
    assert lines["disk"].startswith("model 1 MiB + checkpoints 8 MiB + rollouts at most")
    assert lines["time"].startswith("unknown: --measure 3")
    assert list(here.iterdir()) == []


def test_a_model_that_is_not_here_has_an_unknown_shape(here: Path, preloaded_aitrain: Path) -> None:
    command = [str(preloaded_aitrain / "aitrain"), "plan", "--model", "not/here", "--rl-env", "envs.arithmetic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "memory       unknown: this model's files are not on this machine" in done.stdout


def test_measured_steps_are_those_of_whole_rollouts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(short: RunPlan, debug: bool) -> RunFolder:
        folder, seconds = RunFolder(Path("measured")), 0.0
        lines = []
        for step in range(1, (short.config.max_steps or 0) + 1):
            seconds += 9.0 if step % 4 == 1 else 1.0  # every fourth step samples
            lines.append(json.dumps({"step": step, "seconds": seconds}))
        write(folder.path, {"metrics.jsonl": "\n".join(lines) + "\n", "result.json": '{"train_cases": 64}'})
        return folder

    monkeypatch.setattr(plan_command, "_train", train)
    wanted = check(TrainConfig(model="tiny", rl_env="envs.arithmetic", rl_updates_per_rollout=4))
    for count, done in ((2, 5), (5, 5), (6, 9)):
        time, _ = plan_command._measured(wanted, count, debug=False)
        whole = f"3.00s a step, 1m 36s for 32 steps, without scoring held-out cases, measured in {done} steps"
        assert time == f"time         {whole}, with a rollout every 4"
    assert "rounded up to whole rollouts" in "\n".join(plan_lines(wanted))


@pytest.mark.slow
def test_measured_steps_tell_how_long_the_run_takes(here: Path, aitrain_grpo: Run, preloaded_aitrain: Path) -> None:
    named = ["--model", "tiny", "--rl-env", "envs.arithmetic", "--rl-max-new-tokens", "4", "--project-name", "mine"]
    command = [str(preloaded_aitrain / "aitrain"), "plan", *named, "--epochs", "2", "--measure", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "s a step, " in done.stdout
    assert "steps, without scoring held-out cases, measured in 2 steps" in done.stdout
    assert "of the CPU's memory were used at most" in done.stdout
    assert list(here.iterdir()) == []

    assert aitrain_grpo(*named, "--max-steps", "3", "--eval-cases", "0").returncode == 0
    done = subprocess.run(command[:-2], capture_output=True, text=True, check=False, cwd=here)
    assert "for 3 steps, without scoring held-out cases, as in runs/mine" in done.stdout


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


def test_backends_hold_weights_in_the_type_that_they_train() -> None:
    """With mixed precision accelerate converts trained weights to float32."""
    one = EIGHT_BILLION.weights // 8
    for options, width in (({}, 4), ({"mixed_precision": "no"}, 2), ({"peft": True}, 2)):
        assert shares("fsdp2", dtype="bfloat16", **options).stay["weights"] == width * one, options


def test_a_pass_needs_whole_layers_and_embeddings_beside_the_parts() -> None:
    few, many = shares("fsdp2", 8, rl_kl_coef=0.0), shares("fsdp2", 64, rl_kl_coef=0.0)

    assert sum(many.stay.values()) < sum(few.stay.values()) / 4
    embeddings = 2 * (EIGHT_BILLION.weights - 6_945_767_424)
    assert few.phases["training pass"] > embeddings
    assert many.phases["training pass"] > embeddings


def test_sharding_is_advised_on_several_gpus_only() -> None:
    config = TrainConfig(num_processes=2)

    def advised(processes: int, device: DeviceMemory) -> bool:
        savers = memory_savers(EIGHT_BILLION, config, plan_batch(config, processes), device)
        return any(flag == "--distributed-backend fsdp2" for flag, _ in savers)

    assert advised(2, GPU)
    assert not advised(1, GPU)
    assert not advised(2, CPU)


def test_the_plan_shows_how_the_model_is_sharded_and_the_size_of_a_checkpoint(
    here: Path, preloaded_aitrain: Path
) -> None:
    named = ["--model", "tiny", "--rl-env", "envs.arithmetic", "--distributed-backend", "fsdp2", "--options-only"]
    command = [str(preloaded_aitrain / "aitrain"), "plan", *named]
    done = subprocess.run([*command, "--num-processes=8"], capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "sharding     over 8 processes, a checkpoint of 4 MiB; weights read by each process" in done.stdout

    refused = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert refused.returncode == 2
    assert "one process has nothing to share with fsdp2" in refused.stderr
