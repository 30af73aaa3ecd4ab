"""Real trainings on a GPU: `make gpu` runs them all. `AITRAIN_GPU=rehearse` runs what needs no CUDA, on the CPU with a
tiny model; without the variable they are skipped."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from aitrain.batch import plan_batch
from aitrain.launch.hardware import visible_gpus
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.resource_estimate import LIBRARIES, MIB, ResourceEstimate, device_memory, format_bytes
from aitrain.options.train import TrainConfig
from benchmarks.measuring import in_new_process
from benchmarks.models import make_model
from tests.conftest import read_lines
from tests.gpu.probe import FILE

ROOT = Path(__file__).parents[2]
MODE = os.environ.get("AITRAIN_GPU", "")
IS_REHEARSAL = MODE != "1"
PROMPTS, GENERATIONS = 4, 8
SETTINGS: dict[str, Any] = {
    "rl_env": f"{ROOT / 'tests' / 'gpu' / 'equal_prompts.py'}:EqualPrompts",
    "rl_prompts_per_step": PROMPTS,
    "rl_num_generations": GENERATIONS,
    "batch_size": 8,
    "rl_max_prompt_length": 32,
    "rl_max_new_tokens": 8 if IS_REHEARSAL else 128,
    "rl_kl_coef": 0.0,
    "lr": 1e-4,
    "max_steps": 2 if IS_REHEARSAL else 4,
    "eval_cases": 0,
    "save_strategy": "no",
    "merge_adapter": False,
    "num_processes": 1,
    "project_name": "run",
    "custom_callbacks": f"{ROOT / 'tests' / 'gpu' / 'probe.py'}:Probe",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests in `make test`."""
    if not MODE:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="trains on a GPU for minutes: `make gpu` runs it"))


def need_cuda(reason: str) -> None:
    """Skip a test in a rehearsal."""
    if IS_REHEARSAL:
        pytest.skip(f"{reason} needs CUDA")


def need_package(name: str, advice: str) -> None:
    """Skip a test where a package is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {advice}")


@dataclass(frozen=True)
class Trained:
    """A run that ended well."""

    folder: Path
    config: TrainConfig
    probe: Mapping[str, Any]
    lines: list[dict[str, Any]]
    """Those of its steps."""

    @property
    def figures(self) -> dict[str, float]:
        """Those of its speed: means of all steps but the first one."""
        completions = (self.config.rl_prompts_per_step or PROMPTS) * self.config.rl_num_generations
        seconds, tokens = (
            fmean(line[name] for line in self.lines[1:]) for name in ("time/step", "completions/mean_length")
        )
        return {"seconds per step": seconds, "tokens per second": completions * tokens / seconds}


Train = Callable[..., Trained]
Record = Callable[[str, object], None]
Models = Callable[[str], str]


@pytest.fixture
def train(tmp_path: Path, record_property: Record) -> Iterator[Train]:
    """`train(peft=True, gpus=1)`: `aitrain grpo` with SETTINGS and these options on the first GPUs."""

    def run(gpus: int = 1, **options: Any) -> Trained:
        config = TrainConfig(**{**SETTINGS, "output_dir": str(tmp_path / "runs"), **options})
        settings, probe = tmp_path / "settings.yaml", tmp_path / "probe.json"
        settings.write_text(json.dumps(config.changed()), encoding="utf-8")  # JSON is YAML, too
        visible = "" if IS_REHEARSAL else ",".join(visible_gpus()[:gpus])
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, FILE: str(probe)}
        command = [sys.executable, "-m", "aitrain", "grpo", "--config", str(settings)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=variables)
        assert ended.returncode == 0, (ended.stderr or ended.stdout).strip()[-2000:]
        folder = Path(config.output_dir) / config.project_name
        lines = [line for line in read_lines(folder / "metrics.jsonl") if "reward" in line]
        assert [line["step"] for line in lines] == list(range(1, (config.max_steps or 0) + 1))
        assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
        assert IS_REHEARSAL or all(line["gpu_memory_gib"] > 0 for line in lines)
        done = Trained(folder, config, json.loads(probe.read_text(encoding="utf-8")), lines)
        for name, value in done.figures.items():
            record_property(name, value)
        return done

    yield run
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # models of billions of weights


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """`model_of("0.5B")`: the folder of a random model in that shape, made once."""
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> str:
        if not (folder / name).exists():
            in_new_process(make_model, name, folder / name)  # this one is to take no memory of the GPU
        return str(folder / name)

    yield make
    shutil.rmtree(folder, ignore_errors=True)


def planned_mib(config: TrainConfig) -> float:
    """What `aitrain plan` says that a process takes of the GPU beyond the libraries.

    Skips the test if that is more than is free.
    """
    shape, device = read_model_shape(config.model), device_memory(() if IS_REHEARSAL else visible_gpus()[:1])
    assert shape is not None
    peak = ResourceEstimate(shape, config, plan_batch(config, 1), device).memory.peak
    if device.free is not None and peak > device.free:
        pytest.skip(f"needs about {format_bytes(peak)}, and {format_bytes(device.free)} are free")
    return (peak - LIBRARIES[device.kind]) / MIB
