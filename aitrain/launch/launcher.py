"""What starts the processes of a run: this machine, or a Ray cluster."""

from __future__ import annotations

from typing import Protocol

from aitrain.errors import ConfigError
from aitrain.events import Announce, Ended, Failed
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.runs.run_folder import RunFolder


class RunProcesses(Protocol):
    """The processes of one run."""

    def __init__(self, plan: RunPlan, folder: RunFolder, announce: Announce) -> None: ...
    def run(self) -> Failed | Ended: ...
    def stop(self) -> None: ...


def launcher_of(plan: RunPlan) -> type[RunProcesses]:
    """The class that runs a plan: that of `--launcher`.

    Raises:
        ConfigError: the plan is for several machines, and this command runs on one.
    """
    if plan.nodes is not None:
        raise ConfigError("nnodes: only aitrain grpo runs on several machines\nOmit --nnodes here.")
    if plan.config.launcher == "ray":
        from aitrain.launch.ray_processes import RayProcesses

        return RayProcesses
    return Processes
