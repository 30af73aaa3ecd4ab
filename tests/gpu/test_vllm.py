"""vLLM on a GPU: colocated, asleep while the model trains, and as a server that gets the weights in three ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.launch.hardware import visible_gpus
from aitrain.launch.resource_estimate import MIB, device_memory
from aitrain.vllm.server_arguments import common_arguments, training_arguments
from aitrain.vllm.server_process import VLLMServer, running
from tests.gpu.conftest import (
    IS_REHEARSAL,
    SETTINGS,
    Models,
    Record,
    Train,
    Trained,
    need_cuda,
    need_package,
)

SHAPE = "tiny" if IS_REHEARSAL else "0.5B"
SHARE = 0.3
"""Of the GPU's memory, vLLM's."""
WEIGHTS: dict[str, dict[str, Any]] = {"full": {}, "LoRA": {"peft": True}}
STEPS = 4
"""The learning rate of the first one is 0, so that other weights arrive from the third one on."""
AGREES = 1e-3 if IS_REHEARSAL else 0.1
"""Most difference of log-probabilities: float32 on the CPU, bfloat16 on a GPU."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where it is not installed."""
    need_package("vllm", 'pip install "aitrain[vllm]"')
    monkeypatch.setitem(SETTINGS, "max_steps", STEPS)
    if IS_REHEARSAL:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def check(done: Trained) -> None:
    """The weights of each step have arrived: vLLM says the trainer's log-probabilities."""
    assert max(line["sampling/sampling_logp_difference/mean"] for line in done.lines) < AGREES
    assert all(abs(line["sampling/importance_sampling_ratio/mean"] - 1) < 0.1 for line in done.lines)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_colocated_vllm_samples_with_the_weights_of_each_step(weights: str, train: Train, model_of: Models) -> None:
    check(train(model=model_of(SHAPE), use_vllm=True, **WEIGHTS[weights]))


def test_a_colocated_vllm_that_sleeps_frees_its_memory_for_training(
    train: Train, model_of: Models, record_property: Record
) -> None:
    need_cuda("sleep mode")
    options = {"model": model_of(SHAPE), "use_vllm": True, "vllm_gpu_memory_utilization": SHARE}
    awake = train(**options, project_name="awake")
    asleep = train(**options, vllm_sleep_mode=True)

    total = device_memory(visible_gpus()[:1]).total
    assert total is not None
    record_property("GPU memory in use while training, MiB", asleep.probe["in_use_mib"])
    record_property("without sleep mode", awake.probe["in_use_mib"])
    check(asleep)
    assert asleep.probe["in_use_mib"] < awake.probe["in_use_mib"] - SHARE * total / MIB / 2


@contextmanager
def server(model: str, folder: Path, lora_rank: int | None) -> Iterator[str]:
    """Address of a server of the user's, on one GPU or on the CPU."""
    gpus = () if IS_REHEARSAL else visible_gpus()[:1]
    config = TrainConfig(dtype="bfloat16" if gpus else "float32", vllm_gpu_memory_utilization=SHARE)
    arguments = common_arguments(config, model, gpus, lora_rank) | training_arguments(gpus)
    started = VLLMServer({**arguments, "max_model_len": 256}, folder / "vllm-server.log", gpus)
    with running([started]):
        yield started.url


@pytest.mark.parametrize("sync", ["adapter", "disk"])
def test_a_server_on_the_gpu_of_the_training_gets_the_weights_of_each_step(
    sync: str, tmp_path: Path, train: Train, model_of: Models
) -> None:
    options: dict[str, Any] = {"model": model_of(SHAPE), "peft": sync == "adapter"}
    with server(options["model"], tmp_path, 16 if sync == "adapter" else None) as url:
        check(train(**options, use_vllm=True, vllm_mode="server", vllm_server_url=url, vllm_server_gpus=0))


def test_a_server_that_the_run_starts_has_a_gpu_of_its_own(train: Train, model_of: Models) -> None:
    if not IS_REHEARSAL and len(visible_gpus()) < 2:
        pytest.skip("needs 2 GPUs")
    check(train(gpus=2, model=model_of(SHAPE), peft=True, use_vllm=True, vllm_mode="server"))
