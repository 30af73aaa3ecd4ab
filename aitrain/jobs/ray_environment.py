"""An environment on a Ray cluster: an actor on each machine runs `aitrain env serve`; the training uses all of them."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from aitrain import activity
from aitrain.environment.served_environment import TOKEN_VARIABLE, ServedEnvironment, connect
from aitrain.errors import EnvironmentFailed
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.ray_connection import connected, machines
from aitrain.options.train import TrainConfig

RESOURCE = "environment"
"""Name of a resource of Ray: where machines have it, environments run only there."""
START_SECONDS = 120.0
"""Seconds for the servers to construct the environment."""
SERVED_AT = re.compile(r"--rl-env (http\S+)")
"""In what the server prints when it is ready."""
MOST_SHOWN = 500
"""Last characters of what a server printed that did not start."""

_connection = ExitStack()
"""The connection to the cluster, which lasts as long as this process; Ray ends its actors then."""


class EnvServer:
    """Runs the server of the environment on its machine. A Ray actor; a plain class, for tests without Ray."""

    def __init__(self, request: dict[str, Any], folder: str, address: str, token: str) -> None:
        request["serve"] = {"host": address, "port": 0}
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as self._file:
            json.dump(request, self._file)
        command = [sys.executable, "-P", "-m", "aitrain.jobs.env_terminal", self._file.name]
        variables = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ, TOKEN_VARIABLE: token}
        if not os.path.isdir(folder):
            raise EnvironmentFailed(f"{socket.gethostname()} has no folder {folder}")
        self._tree = ProcessTree(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder)

    def url(self) -> str:
        """Its address, when the environment is ready.

        Raises:
            EnvironmentFailed: the environment cannot be served.
        """
        said = ""
        for line in self._tree.stdout:
            said += line.decode(errors="replace")
            if found := SERVED_AT.search(said):
                os.unlink(self._file.name)
                return found[1]
        said = said.strip()[-MOST_SHOWN:]
        raise EnvironmentFailed(f"The environment cannot be served on {socket.gethostname()}: {said}")


def start_on_ray(config: TrainConfig) -> tuple[ServedEnvironment, list[str]]:
    """Serve the environment on the machines of a Ray cluster; returns it, and why machines are left out.

    Raises:
        ConfigError: there is no cluster.
        EnvironmentFailed: no machine can serve it.
    """
    activity.own.enter("starting the environment on Ray", moves_files=True)
    _connection.enter_context(connected(config.ray_address))
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
    names = ("rl_env", "rl_env_module", "rl_env_class", "rl_env_config", "rl_env_timeout", "seed", "model")
    given = {name: getattr(config, name) for name in names}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"rl_env_workers": config.env_calls, "rl_env_isolation": "process"}
    cluster = machines()
    chosen = [machine for machine in cluster if machine.total.get(RESOURCE)] or cluster
    servers = []
    for machine in chosen:
        here = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=here)(EnvServer)
        servers.append(actor.remote({"command": "serve", "options": options}, os.getcwd(), machine.address, token))
    _connection.callback(servers.clear)  # an actor ends with its last handle
    urls, problems = [], []
    for machine, server in zip(chosen, servers, strict=True):
        try:
            urls.append(ray.get(server.url.remote(), timeout=START_SECONDS))
        except ray.exceptions.RayError as error:
            problems.append(f"{machine.host}: {getattr(error, 'cause', None) or str(error).partition(chr(10))[0]}")
    if not urls:
        raise EnvironmentFailed("\n".join(problems[:2]) or "no machine of the Ray cluster runs the environment")
    return connect(",".join(urls)), problems
