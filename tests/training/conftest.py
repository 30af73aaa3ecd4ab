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
from tests.conftest import episodes_of, free_port
from tests.finished_runs import SHORT, quick

Train = Callable[..., Result]
"""`train(environment, option=...)`."""

torch.set_num_threads(1)  # threads that wait for each other gain nothing on the small model


@pytest.fixture(autouse=True)
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what tests of a run do not look at."""
    quick(monkeypatch)


@pytest.fixture
def train(small_model: Path, tmp_path: Path) -> Train:
    """`train(environment, option=...)`: a run of a few steps on the small model, in this process."""

    def run(environment: Any, **options: Any) -> Result:
        config = {**SHORT, "model": str(small_model), "output_dir": str(tmp_path / "runs"), "save_strategy": "no"}
        config |= options
        return aitrain.train(TrainConfig(**config), environment=environment)

    return run


def random_adapter(base: Path | str, **options: Any) -> PeftModel:
    """A model with an adapter of random weights, which change what it says."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).eval()


def save_adapter(base: Path | str, folder: Path, **options: Any) -> PeftModel:
    """The same, saved with the tokenizer of its base."""
    adapter = random_adapter(base, **options)
    adapter.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return adapter


def rollouts(result: Result, phase: str | None = None) -> list[dict[str, Any]]:
    """The records of training, of all processes; or those of a scoring of held-out cases."""
    return episodes_of(result.folder, phase)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model, or of an adapter."""
    return dict(load_file(min(folder.glob("*.safetensors"))))


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
