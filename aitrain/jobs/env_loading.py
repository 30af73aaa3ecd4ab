"""Loads the environments of a run, in the process that trains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

from aitrain import activity
from aitrain.environment.contract import check_methods
from aitrain.environment.loader import load_env
from aitrain.environment.locator import EnvSource, errors_of, locate_environments
from aitrain.environment.mixed_runner import MixedRunner, Runner
from aitrain.environment.requirements import with_largest, with_requirements
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.events import Announce, Note
from aitrain.jobs.fork_host import env_command
from aitrain.options.train import TrainConfig

if TYPE_CHECKING:
    from aitrain.execution.ray_pool import RayPool


def load_runner(config: TrainConfig, announce: Announce, close: Sequence[int] = ()) -> Runner:
    """Load the environments, and start the processes of those that run in processes of their own. The runner's options
    have what the environments require. These processes close the file descriptors in `close`.

    Raises:
        AitrainError: one cannot be loaded.
    """
    parts, sources = dict[str, EnvRunner](), locate_environments(config)
    for name, own in config.environments.items():
        fds = [*close, *(fd for part in parts.values() for fd in part.process_fds)]
        with errors_of(name):
            parts[name] = _load_one(own, sources[name], announce, fds)
    if list(parts) == [""]:
        return parts[""]
    return MixedRunner(parts, with_largest(config, [part.config for part in parts.values()]))


def _load_one(config: TrainConfig, source: EnvSource, announce: Announce, close: Sequence[int]) -> EnvRunner:
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    environment = load_env(source, config.rl_env_config or {})
    check_methods(environment)
    config, note = with_requirements(config, environment)
    if note:
        announce(Note(note, "info"))
    if config.is_env_on_ray:
        pool = start_on_ray(config)
        for problem in pool.problems.values():
            announce(Note(f"A machine of the Ray cluster is left out: {problem}"))
        return EnvRunner(environment, config, pool)
    return start_runner(environment, config, close)


def start_on_ray(config: TrainConfig) -> RayPool:
    """Start the environment on the machines of a Ray cluster.

    Raises:
        ConfigError: there is no cluster.
        EnvironmentFailed: it cannot be loaded there.
    """
    from aitrain.execution.ray_pool import RayPool

    activity.own.enter("starting the environment on Ray", moves_files=True)
    return RayPool.start(env_command(config), config.env_calls or 1, config.ray_address)
