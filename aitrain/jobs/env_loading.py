"""Loads the environments of a run, in the process that trains."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy

from aitrain.environment.contract import check_methods
from aitrain.environment.loader import EnvSource, errors_of, load_env, locate_environments
from aitrain.environment.requirements import with_largest, with_requirements
from aitrain.environment.runner import EnvRunner, MixedRunner, Runner, start_runner
from aitrain.events import Announce, Note
from aitrain.options.train import TrainConfig


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
    if config.is_env_on_ray:
        from aitrain.jobs.ray_environment import start_on_ray

        environment: object
        environment, problems = start_on_ray(config)
        for problem in problems:
            announce(Note(f"A machine of the Ray cluster is left out: {problem}"))
    else:
        environment = load_env(source, config.rl_env_config or {})
    check_methods(environment)
    config, note = with_requirements(config, environment)
    if note:
        announce(Note(note, "info"))
    return start_runner(environment, config, close)
