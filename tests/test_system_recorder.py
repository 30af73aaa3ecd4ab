"""The use of CPU, memory and GPUs is recorded while a run lasts, in a file of bounded size."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from aitrain.launch import system_recorder
from aitrain.launch.system_recorder import SystemRecorder
from aitrain.runs.run_folder import append_lines, read_lines
from tests.conftest import write

SMI = """#!/bin/sh
echo "$@" > "$(dirname "$0")/asked"
echo "0, NVIDIA H200, 143771, 102000, 40960, 93"
echo "1, Other, [N/A], [N/A], [N/A], [N/A]"
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that tells of two GPUs; returns the file with what it was asked."""
    write(tmp_path, {"bin/nvidia-smi": SMI})
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin" / "asked"


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


def test_the_file_stays_small_and_covers_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_recorder, "MOST_LINES", 8)
    monkeypatch.setattr(system_recorder, "SHARE", 1e9)
    monkeypatch.setattr(system_recorder, "ask_driver", lambda only: None)
    file, taken = tmp_path / "system.jsonl", threading.Semaphore(0)
    append_lines(file, [{"time": float(n)} for n in range(5)])  # of the run before it was resumed
    sample = SystemRecorder.sample
    monkeypatch.setattr(SystemRecorder, "sample", lambda self: [sample(self), taken.release()][0])
    with SystemRecorder(file, every=0.001):
        for _ in range(8):
            taken.acquire(timeout=20)
    times = [line["time"] for line in read_lines(file)]
    assert len(times) <= 8
    assert times[0] == 0.0
    assert times == sorted(times)
