"""The environment variables of training processes; that they arrive is in training/test_episode_groups.py."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.launch import processes
from aitrain.launch.model_shape import SMALL
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import Processes, process_variables
from aitrain.runs.run_folder import RunFolder


@pytest.fixture
def plan() -> RunPlan:
    return check(TrainConfig(model="tiny", rl_env="envs.arithmetic"))


@pytest.mark.parametrize(("own", "seed"), [(None, "0"), ("7", "7")])
def test_training_processes_have_one_hash_seed_unless_the_user_set_another(
    own: str | None, seed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: RunPlan
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if own is not None:
        monkeypatch.setenv("PYTHONHASHSEED", own)
    assert Processes(plan, RunFolder(tmp_path), print)._environment()["PYTHONHASHSEED"] == seed


def test_a_small_model_trains_with_one_thread_on_the_cpu_and_a_larger_one_with_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: RunPlan
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    larger = TrainConfig(model=str(model_of(SMALL, tmp_path)), rl_env="envs.arithmetic")
    unknown = TrainConfig(model="nobody/not-here", rl_env="envs.arithmetic")
    plans = [dataclasses.replace(plan, config=config) for config in (plan.config, larger, unknown)]
    assert [process_variables(each)["OMP_NUM_THREADS"] for each in plans] == ["1", "8", "8"]
    on_gpu = dataclasses.replace(plan, gpus=("0",))
    assert process_variables(on_gpu)["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process_variables(plan)["OMP_NUM_THREADS"] == "3"


def model_of(weights: int, folder: Path) -> Path:
    """A model's config.json, and a safetensors file of which there is only the header."""
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 8,
        "intermediate_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [weights], "data_offsets": [0, 4 * weights]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder
