"""The actor that runs the vLLM servers of a run on a machine of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aitrain.errors import AitrainError, RunFailed
from aitrain.events import Announce, Phase
from aitrain.execution.ray_connection import has_gpus
from aitrain.launch.managed_server import managed_server
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import PATIENCE
from aitrain.runs.run_folder import RunFolder


@dataclass
class ServerHost:
    """Starts the servers, restarts those that die, and ends them. A Ray actor."""

    plan: RunPlan
    folder: RunFolder
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> dict[str, str]:
        """Start the servers, which listen at this machine's address; environment variables for training processes.

        Raises:
            RunFailed: a server cannot be started.
        """
        import ray.util

        gpus = tuple(gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu)
        config = self.plan.config.model_copy(update={"vllm_listen_address": ray.util.get_node_ip_address()})
        plan = replace(self.plan, config=config, server_gpus=gpus)
        return self._stack.enter_context(managed_server(plan, self.folder, lambda event: None))

    def close(self) -> None:
        """End the servers."""
        self._stack.close()


def server_needs(plan: RunPlan) -> dict[str, float]:
    """What the run's vLLM servers reserve, all of them on one machine."""
    gpus = float(plan.config.vllm_servers * plan.config.vllm_server_gpus)
    return {"CPU": 1.0, "GPU": gpus} if has_gpus() else {"CPU": 1.0}


@contextmanager
def server_on_ray(plan: RunPlan, folder: RunFolder, announce: Announce) -> Iterator[dict[str, str]]:
    """Run the vLLM servers of a plan, if it has some, on a machine that Ray chooses; yields the environment variables
    with which training processes reach them.

    Raises:
        RunFailed: a server cannot be started.
    """
    if not plan.config.starts_vllm_servers:
        yield {}
        return
    announce(Phase("starting vLLM on a machine of Ray"))
    import ray

    needs = server_needs(plan)
    actor = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0.0), max_concurrency=2)(ServerHost)
    host = actor.remote(replace(plan, sources={}), RunFolder(folder.path.absolute()))
    starting = host.start.remote()
    try:
        while not ray.wait([starting], timeout=0.1)[0]:
            pass  # Ctrl-C is heard
        yield _result(starting)
    finally:
        with suppress(Exception):  # it is gone
            ray.get(host.close.remote(), timeout=PATIENCE)


def _result(starting: Any) -> Any:
    import ray

    try:
        return ray.get(starting)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, AitrainError) else RunFailed(str(error.cause)) from None
