"""What aitrain leans on inside Ray, by name, so that a new release says which one moved."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra ray); make ray installs it")

import ray
import ray.train
from ray._private.services import canonicalize_bootstrap_address
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from aitrain.launch.ray_processes import cause_of


def test_a_cluster_can_be_started_in_a_folder_of_ours() -> None:
    assert "**kwargs" in str(inspect.signature(ray.init)) or "_temp_dir" in inspect.signature(ray.init).parameters
    assert "_temp_dir" in inspect.getsource(ray.init)


def test_an_address_is_resolved_before_ray_waits_for_it() -> None:
    assert canonicalize_bootstrap_address("127.0.0.1:6379").endswith(":6379")


def test_the_trainer_runs_a_function_with_these_settings_and_without_torch() -> None:
    parameters = inspect.signature(DataParallelTrainer.__init__).parameters
    assert {"train_loop_config", "scaling_config", "run_config"} <= parameters.keys()
    assert "torch" not in inspect.getsource(inspect.getmodule(DataParallelTrainer) or DataParallelTrainer)
    assert ray.train.FailureConfig(max_failures=2).max_failures == 2
    assert list(inspect.signature(broadcast_from_rank_zero).parameters) == ["data"]


def test_the_errors_of_ray_train_name_the_rank_and_the_cause() -> None:
    raised = UserExceptionWithTraceback(ValueError("no"), "Traceback (most recent call last):\n  x\nValueError: no")
    assert cause_of(WorkerGroupError("", {3: raised})) == "Rank 3 was lost: ValueError: no"
    assert cause_of(ControllerError(RuntimeError("no room"))) == "no room"
