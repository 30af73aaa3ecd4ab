"""A fork server that loads the environment itself: `python -m aitrain.jobs.fork_host SOCKET`.

It is started on the machines of a Ray cluster, where nothing was loaded that could be forked.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys

import numpy

from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.execution.fork_server import EnvCommand, run_fork_server
from aitrain.execution.message_socket import MessageSocket
from aitrain.options.train import TrainConfig

MODULE = "aitrain.jobs.fork_host"


def env_command(config: TrainConfig) -> EnvCommand:
    """The command that loads the environment of these options in this working directory."""
    names = ("rl_env", "rl_env_module", "rl_env_class", "rl_env_config", "seed")
    request = json.dumps({name: getattr(config, name) for name in names}).encode()
    return EnvCommand((sys.executable, "-P", "-m", MODULE), request, os.getcwd())


def main(connection: socket.socket) -> None:
    """Load the environment, say so, and serve."""
    # forked processes need these in their first call, and importing them there takes from its time
    import aitrain.environment.group_scoring
    import aitrain.environment.remote_session  # noqa: F401

    messages = MessageSocket(connection)
    request, _ = messages.receive()
    try:
        config = TrainConfig.read(json.loads(request or b"{}"))
        _seed(config.seed)
        environment = load_env(find_env(config), config.rl_env_config or {})
    except Exception as error:
        messages.send(f"{type(error).__name__}: {error}".encode())
        return
    messages.send(b"")
    run_fork_server(environment, connection, [], None)


def _seed(seed: int) -> None:
    """As the training process does before it loads the environment."""
    random.seed(seed)
    numpy.random.seed(seed)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
