"""The environment variables of training processes."""

from __future__ import annotations

import dataclasses
import os
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


def variables(plan: RunPlan) -> dict[str, str]:
    return Processes(plan, RunFolder(Path("run")), print)._environment()


def test_a_training_process_does_not_get_another_launchers_ranks(
    monkeypatch: pytest.MonkeyPatch, plan: RunPlan
) -> None:
    for name in ("RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & variables(plan).keys()
    assert variables(plan)["PATH"] == os.environ["PATH"]


def test_training_processes_have_one_hash_seed_unless_the_user_set_another(
    monkeypatch: pytest.MonkeyPatch, plan: RunPlan
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert variables(plan)["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert variables(plan)["PYTHONHASHSEED"] == "7"


def test_a_small_model_trains_with_one_thread_on_the_cpu_and_a_larger_one_with_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, plan: RunPlan
) -> None:
    def threads(plan: RunPlan) -> str:
        return variables(plan)["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    unknown = TrainConfig(model="nobody/not-here", rl_env="envs.arithmetic")
    plans = [plan, dataclasses.replace(plan, config=unknown), dataclasses.replace(plan, gpus=("0",))]
    assert [threads(each) for each in plans] == ["1", "8", "8"]
    monkeypatch.setattr("aitrain.launch.model_shape.SMALL", 1)
    assert threads(plan) == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(plan) == "3"
