"""The environment variables of training processes; that they arrive is in training/test_episode_groups.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.launch import processes
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import Processes
from aitrain.runs.run_folder import RunFolder


@pytest.fixture
def plan() -> RunPlan:
    return check(TrainConfig(model="tiny", rl_env="envs.arithmetic"))


def test_training_processes_have_one_hash_seed_unless_the_user_set_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: RunPlan
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    made = Processes(plan, RunFolder(tmp_path), print)
    assert made._environment()["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert made._environment()["PYTHONHASHSEED"] == "7"


def test_a_small_model_trains_with_one_thread_on_the_cpu_and_a_larger_one_with_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, plan: RunPlan, tmp_path: Path
) -> None:
    def threads(plan: RunPlan) -> str:
        return Processes(plan, RunFolder(tmp_path), print)._environment()["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    unknown = TrainConfig(model="nobody/not-here", rl_env="envs.arithmetic")
    plans = [plan, dataclasses.replace(plan, config=unknown), dataclasses.replace(plan, gpus=("0",))]
    assert [threads(each) for each in plans] == ["1", "8", "8"]
    monkeypatch.setattr("aitrain.launch.model_shape.SMALL", 1)
    assert threads(plan) == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(plan) == "3"
