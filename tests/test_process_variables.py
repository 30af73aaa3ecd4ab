"""The environment variables of training processes; that they arrive is in training/test_episode_groups.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.launch import processes
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import Processes, process_variables
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
    monkeypatch: pytest.MonkeyPatch, plan: RunPlan
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    unknown = TrainConfig(model="nobody/not-here", rl_env="envs.arithmetic")
    plans = [plan, dataclasses.replace(plan, config=unknown), dataclasses.replace(plan, gpus=("0",))]
    assert [process_variables(each)["OMP_NUM_THREADS"] for each in plans] == ["1", "8", "8"]
    monkeypatch.setattr("aitrain.launch.model_shape.SMALL", 1)
    assert process_variables(plan)["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process_variables(plan)["OMP_NUM_THREADS"] == "3"
