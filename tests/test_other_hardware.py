"""`aitrain plan --gpu`: what a run would do on hardware that is not here."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.launch import resource_estimate
from aitrain.launch.hardware import KINDS, Hardware
from aitrain.launch.model_shape import KNOWN
from aitrain.launch.preflight import check
from aitrain.launch.resource_estimate import MIB
from aitrain.launch.step_estimate import HardwareEstimate
from tests.conftest import run_in_process

QWEN = "--model Qwen/Qwen3-4B --rl-env envs.arithmetic --rl-prompts-per-step 32"
QWEN += " --rl-num-generations 8 --rl-max-new-tokens 512 --use-vllm"
SERVED = "--vllm-mode server"


def plan(flags: str) -> dict[str, Any]:
    code, out, err = run_in_process(f"plan {QWEN} {flags} --json")
    assert code == 0, err
    return json.loads(out)


def step(flags: str) -> list[float]:
    return plan(flags)["estimate"]["seconds"]["step"]


def test_there_is_a_plan_for_each_known_model_on_each_kind_of_gpu() -> None:
    for kind in KINDS.values():
        for model in KNOWN:
            hardware = Hardware(kind, 1, 1)
            made = check(TrainConfig(model=model, rl_env="envs.arithmetic", use_vllm=True), hardware=hardware)
            found = HardwareEstimate.of(made.needs, hardware)
            assert all(0 < least < most for least, most in found.seconds.values()), (model, kind)
            fits = found.memory.peak <= 0.9 * kind.memory * MIB and (found.cached_episodes or 0) >= 1
            assert fits == (found.changes == []), (model, kind)


def test_nothing_of_this_machine_is_in_a_plan_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan("--gpu H100x8")

    def unasked(*_: object) -> None:
        raise AssertionError("this machine was asked")

    for name in ("free_memory", "total_memory", "ask_driver"):
        monkeypatch.setattr(resource_estimate, name, unasked)
    monkeypatch.setattr(shutil, "disk_usage", unasked)
    here = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "CUDA_VISIBLE_DEVICES": "5"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    assert plan("--gpu H100x8") == plain


def test_of_flags_that_suffice_a_plan_names_the_one_that_changes_least_of_the_training() -> None:
    flags = "--gpu L40S --model Qwen/Qwen3-1.7B --rl-kl-coef 0 --batch-size 1"
    assert plan(flags)["estimate"]["changes"] == ["--vllm-sleep-mode"]


@pytest.mark.parametrize(
    ("flags", "processes", "gpus"),
    [
        ("H100x8 --nodes 2", 16, 8),
        (f"h100x8 {SERVED} --vllm-servers 2", 6, 6),
        ("H100x8 --nodes 2 --launcher ray --num-processes 12", 12, 6),
    ],
)
def test_each_gpu_that_vllm_leaves_trains_on_each_machine(flags: str, processes: int, gpus: int) -> None:
    made = plan(f"--rl-prompts-per-step 48 --gpu {flags}")
    assert f" = {processes} process" in dict(made["lines"])["batch"]
    assert made["gpus"] == list(map(str, range(gpus)))


@pytest.mark.parametrize(
    "flags",
    [
        "H100",
        "A100-40",
        "H100x8",
        "L4 --peft",
        "B200 --batch-size 256",
        f"L40Sx4 --peft {SERVED} --vllm-server-gpus 2 --vllm-tensor-parallel-size 2 --model Qwen/Qwen3-32B",
        "L40Sx8 --distributed-backend fsdp2 --model Qwen/Qwen3-8B",  # vLLM's share is too small
        "L40Sx8 --vllm-sleep-mode --optimizer adamw_8bit",  # whose state is not sharded
    ],
)
def test_with_the_flags_that_a_plan_names_the_run_fits(flags: str) -> None:
    changes = plan(f"--gpu {flags}")["estimate"]["changes"]
    assert changes
    assert plan(f"--gpu {flags} {' '.join(changes)}")["estimate"]["changes"] == []


def test_a_step_takes_longer_with_more_to_do_and_less_on_more_or_faster_gpus() -> None:
    usual = step("--gpu A100-80")
    assert all(map(float.__lt__, usual, step("--gpu A100-80 --rl-max-new-tokens 1024")))
    assert all(map(float.__gt__, usual, step("--gpu A100-80 --rl-kl-coef 0")))
    assert all(map(float.__gt__, usual, step("--gpu A100-80x4")))
    assert all(map(float.__gt__, usual, step("--gpu H200")))
    served = plan(f"--gpu H100x2 {SERVED} --rl-ahead 1")["estimate"]["seconds"]
    assert served["step"][1] < sum(most for part, (_, most) in served.items() if part != "step")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--gpu H10", "Did you mean H100?"),
        ("--gpu A100", "A100-40, A100-80"),
        ("--gpu H100x100", "at most 99"),
        ("--nodes 2", "Add --gpu"),
        ("--gpu T4 --mixed-precision bf16", "T4 has no bfloat16"),
        ("--gpu H100 --model someone/model", "Qwen3-4B"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags: str, told: str) -> None:
    code, _, err = run_in_process(f"plan {QWEN} {flags}")
    assert code == 2
    assert told in err
    assert len(err.splitlines()) <= 5


def test_a_t4_has_no_bfloat16_and_holds_float32() -> None:
    served = f"--peft {SERVED} --vllm-server-url http://10.1.2.3:8000"
    t4, l4 = plan(f"--gpu T4 {served}"), plan(f"--gpu L4 {served}")
    assert t4["estimate"]["memory"]["stay"]["weights"] == 2 * l4["estimate"]["memory"]["stay"]["weights"]
    assert "bfloat16" in t4["notes"][0]
    assert l4["notes"] == []
