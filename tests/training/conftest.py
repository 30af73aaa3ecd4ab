"""What the tests of the heavy wing share: short runs on the small model."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import aitrain
from aitrain import Result, TrainConfig
from aitrain.runs.run_folder import read_lines
from tests.conftest import free_port
from tests.finished_runs import SHORT, quick

torch.set_num_threads(1)  # threads that wait for each other gain nothing on the small model


@pytest.fixture(autouse=True)
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what tests of a run do not look at."""
    quick(monkeypatch)


@pytest.fixture
def train(small_model: Path, tmp_path: Path) -> Callable[..., Result]:
    """`train(environment, option=...)`: a run of a few steps on the small model, in this process."""

    def run(environment: Any, **options: Any) -> Result:
        config = {**SHORT, "model": str(small_model), "output_dir": str(tmp_path / "runs"), "save_strategy": "no"}
        config |= options
        return aitrain.train(TrainConfig(**config), environment=environment)

    return run


def save_adapter(base: Path | str, folder: Path, **options: Any) -> PeftModel:
    """An adapter of random weights, which change what the model says, saved with the tokenizer of its base."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).eval()
    adapter.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return adapter


def rollouts(result: Result, phase: str | None = None) -> list[dict[str, Any]]:
    """The records of training, of all processes; or those of a scoring of held-out cases."""
    records = [record for file in sorted(result.folder.glob("rollouts/*.jsonl")) for record in read_lines(file)]
    return [record for record in records if record.get("eval_phase") == phase]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def difference(one: Path, other: Path) -> float:
    """The largest difference between the weights of two saved models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def run_group(preloaded: Path, processes: int, *arguments: object) -> None:
    """Run scripted_run.py in a group of processes, which are forked from one that has imported torch and TRL."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    script = str(Path(__file__).with_name("scripted_run.py"))
    running = [
        subprocess.Popen(
            [str(preloaded / "preloaded-python"), "-P", "-m", script, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=800)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)
