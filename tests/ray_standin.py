"""Ray Train without Ray: what a run would be started with."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain.errors import ConfigError
from aitrain.launch import preflight, ray_processes
from aitrain.launch.ray_processes import RayProcesses, launcher_of
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder


def started(config: TrainConfig) -> dict[str, Any]:
    """The class that runs this, the address of the cluster, and the settings of Ray Train."""
    seen: dict[str, Any] = {}

    def connected(address: str | None, may_start: bool) -> None:
        seen["address"] = address
        raise ConfigError("not connected")

    def trainer(job: object, **settings: object) -> SimpleNamespace:
        seen["settings"] = settings
        return SimpleNamespace(fit=lambda: None)

    train = SimpleNamespace(FailureConfig=SimpleNamespace, RunConfig=SimpleNamespace, ScalingConfig=SimpleNamespace)
    modules = {
        "ray": SimpleNamespace(train=train, get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")),
        "ray.train": train,
        "ray.train.v2.api.data_parallel_trainer": SimpleNamespace(DataParallelTrainer=trainer),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "check_packages", lambda _: None)
        patch.setattr(ray_processes, "connected", connected)
        patch.setattr(ray_processes, "has_gpus", lambda: False)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        plan = preflight.check(config)
        seen["class"] = launcher_of(plan).__name__
        if seen["class"] == RayProcesses.__name__:
            folder = RunFolder(Path("run"))
            folder.path.mkdir(exist_ok=True)
            run = RayProcesses(plan, folder, lambda _: None)
            with suppress(ConfigError):
                run.run()
            ray_processes.fit(plan, folder)
    return seen
