"""The use of CPU, memory and GPUs is recorded while a run lasts, in a file of bounded size."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aitrain.launch import hardware
from aitrain.launch.hardware import SystemRecorder
from aitrain.launch.resource_estimate import MIB, device_memory
from aitrain.runs.run_folder import read_lines
from tests.conftest import write_nvidia_smi

SMI = """
echo "$@" > "$(dirname "$0")/asked"
echo "0, NVIDIA H200, 143771, 102000, 40960, 93"
echo "1, Other, [N/A], [N/A], [N/A], [N/A]"
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that tells of two GPUs; returns the file with what it was asked."""
    write_nvidia_smi(tmp_path, SMI)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "asked"


def test_a_sample_has_the_cores_the_memory_and_each_gpu(
    gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SystemRecorder(tmp_path / "system.jsonl")
    recorder.sample()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    sample = recorder.sample()
    assert (sample["gpu_use/0"], sample["gpu_memory_gib/0"]) == (0.93, 40.0)
    assert "gpu_use/1" not in sample
    assert 0 < sample["cpu_cores"] < 64
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    recorder.sample()
    assert "--id=1,3" in gpus.read_text()
    assert device_memory(["GPU-5a", "1"]).total == 143771 * MIB
    assert "--id=GPU-5a,1" in gpus.read_text()


def test_samples_are_taken_while_the_run_lasts_ever_further_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "ask_driver", lambda only: None)
    now = [0.0]
    monkeypatch.setattr(hardware, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    waited = list[float]()

    def wait(seconds: float) -> bool:
        now[0] += seconds
        waited.append(seconds)
        return len(waited) > 600

    recorder = SystemRecorder(tmp_path / "system.jsonl")
    monkeypatch.setattr(recorder._over, "wait", wait)
    recorder.run()
    assert len(list(read_lines(recorder.path))) == 600
    assert waited[0] == 5.0
    assert 8.0 < waited[-1] < 60.0
