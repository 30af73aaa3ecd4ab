"""What starts the processes of a run: this machine, or a Ray cluster."""

from __future__ import annotations

from aitrain.errors import ConfigError
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes


def launcher_of(plan: RunPlan) -> type[Processes]:
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
