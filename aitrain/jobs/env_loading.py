"""Loads the environments of a run, in the process that trains, describes them, and checks them before the training.

On a Ray cluster an actor on each machine runs `aitrain env serve`; the training uses all of them.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy

from aitrain import activity
from aitrain.environment.adapters import adapter_named
from aitrain.environment.loader import load_env
from aitrain.environment.requirements import requirements_of, with_largest, with_requirements
from aitrain.environment.runner import EnvRunner, MixedRunner, Runner, start_runner
from aitrain.environment.served_environment import TOKEN_VARIABLE, ServedEnvironment, connect
from aitrain.errors import EnvironmentFailed, errors_of
from aitrain.events import Announce, Note
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.ray_connection import connected, machines
from aitrain.machine import usable_cores
from aitrain.options.train import TrainConfig
from aitrain.packages import version_of
from aitrain.redaction import without_secrets
from aitrain.runs.environment_source import files_of, source_facts, source_hash

if TYPE_CHECKING:
    from aitrain.training.run_context import RunContext

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


def load_runner(config: TrainConfig, announce: Announce) -> Runner:
    """Load the environments, and start the processes of those that run in processes of their own. The runner's options
    have what the environments require.

    Raises:
        AitrainError: one cannot be loaded.
    """
    parts = dict[str, EnvRunner]()
    for name, own in config.environments.items():
        with errors_of(name):
            random.seed(own.seed)
            numpy.random.seed(own.seed)
            environment = start_on_ray(own, announce) if own.is_env_on_ray else load_env(own)
            own, note = with_requirements(own, environment)
            if note:
                announce(Note(note, "info"))
            parts[name] = start_runner(environment, own)
    if list(parts) == [""]:
        return parts[""]
    return MixedRunner(parts, with_largest(config, [part.config for part in parts.values()]))


def check_environments(context: RunContext) -> None:
    """Check each environment, if the options ask for it, and note what was found. A finding does not end a run: the
    model may answer better than the scripted answers of the checks.

    Raises:
        EnvironmentFailed: in a dry run, every episode failed, so the run would end when it scores its held-out cases.
    """
    if not context.config.rl_check or activity.own.rank != 0:
        return
    from aitrain.workbench.check.process import check_quickly  # here, as only the first process needs it

    context.enter("checking the environment", moves_files=False)
    for name, runner in context.runner.parts.items():
        if isinstance(runner.environment, ServedEnvironment):  # its server is shared
            continue
        notes, failure = check_quickly(runner.config)
        for note in notes:
            context.note(f"{name}: {note.text}" if name else note.text, note.level)
        if failure and context.dry_run_of:
            with errors_of(name):
                raise EnvironmentFailed(
                    f"Each of the episodes that were tried failed: {failure}\n"
                    "A run whose held-out cases all fail ends before its first step. Try one: aitrain env play"
                )


# -- environment.json

PACKAGES = ("aitrain", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


def describe_run(runner: Runner) -> dict[str, Any]:
    """Environments, versions and hardware of a run. Of several environments, what they are together, and each."""
    import torch  # here, as environments are loaded before it

    parts, each = runner.parts, dict[str, dict[str, Any]]()
    packages = list(PACKAGES)
    for name, part in parts.items():
        each[name] = {
            **source_facts(part.environment),
            "config": without_secrets(part.config.rl_env_config),
            "requires": requirements_of(part.environment).as_options(),
        }
        if isinstance(part.environment, ServedEnvironment):
            each[name] |= part.environment.facts
        adapter = adapter_named(part.config.env_place.partition(":")[0])
        if adapter is not None and adapter.package:
            packages.append(adapter.package)
    commit = None
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        commit = done.stdout.strip() or None
    facts = {
        "packages": {name: version for name in packages if (version := version_of(name))},
        "git_commit": commit,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if "" in each:
        return {**each[""], **facts}
    for name, share in runner.config.env_shares.items():
        each[name] |= {"share": share, "score_range": parts[name].config.rl_score_range}
    return {
        "class": ", ".join(f"{name}={one['class']}" for name, one in each.items()),
        "sha256": source_hash(file for part in parts.values() for file in files_of(part.environment)),
        "config": {name: one["config"] for name, one in each.items()},
        "requires": {option: getattr(runner.config, option) for one in each.values() for option in one["requires"]},
        "environments": each,
        **facts,
    }


# -- an environment on a Ray cluster


def start_on_ray(config: TrainConfig, announce: Announce) -> ServedEnvironment:
    """Serve the environment on the machines of a Ray cluster. Machines that cannot are left out, with a note.

    Raises:
        ConfigError: there is no cluster.
        EnvironmentFailed: no machine can serve it.
    """
    activity.own.enter("starting the environment on Ray", moves_files=True)
    _connection.enter_context(connected(config.ray_address))
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
    names = {"rl_env", "rl_env_module", "rl_env_class", "rl_env_config", "rl_env_timeout", "seed", "model"}
    options = config.model_dump(include=names, exclude_none=True)
    options |= {"rl_env_workers": config.env_calls, "rl_env_isolation": "process"}
    cluster = machines()
    chosen = [machine for machine in cluster if machine["Resources"].get(RESOURCE)] or cluster
    servers = []
    for machine in chosen:
        here = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=here)(EnvServer)
        serve = {"host": machine["NodeManagerAddress"], "port": 0}
        servers.append(actor.remote({"command": "serve", "options": options, "serve": serve}, os.getcwd(), token))
    _connection.callback(servers.clear)  # an actor ends with its last handle
    urls, problems = [], []
    for machine, server in zip(chosen, servers, strict=True):
        try:
            urls.append(ray.get(server.url.remote(), timeout=START_SECONDS))
        except ray.exceptions.RayError as error:
            why = getattr(error, "cause", None) or str(error).partition("\n")[0]
            problems.append(f"{machine['NodeManagerHostname']}: {why}")
            announce(Note(f"A machine of the Ray cluster is left out: {problems[-1]}"))
    if not urls:
        raise EnvironmentFailed("\n".join(problems[:2]) or "no machine of the Ray cluster runs the environment")
    return connect(",".join(urls))


class EnvServer:
    """Runs the server of the environment on its machine. A Ray actor; a plain class, for tests without Ray."""

    def __init__(self, request: dict[str, Any], folder: str, token: str) -> None:
        with tempfile.TemporaryFile("w", encoding="utf-8") as file:
            json.dump(request, file)
            file.seek(0)
            place = f"/dev/fd/{file.fileno()}"
            self._tree = ProcessTree(
                [sys.executable, "-P", "-m", "aitrain.ui.output", "aitrain.jobs.env_terminal", place],
                env={"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ, TOKEN_VARIABLE: token},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                pass_fds=[file.fileno()],
            )

    def url(self) -> str:
        """Its address, when the environment is ready.

        Raises:
            EnvironmentFailed: the environment cannot be served.
        """
        said = ""
        for line in self._tree.stdout:
            said += line.decode(errors="replace")
            if found := SERVED_AT.search(said):
                # what it prints later is read, too: it would wait for room in the pipe
                threading.Thread(target=deque, args=[self._tree.stdout, 0], daemon=True).start()
                return found[1]
        said = said.strip()[-MOST_SHOWN:]
        raise EnvironmentFailed(f"The environment cannot be served on {socket.gethostname()}: {said}")
