"""Loads the environments of a run, in the process that trains, and checks them before the training."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy

from aitrain import activity
from aitrain.environment.contract import check_methods
from aitrain.environment.dataset import Datasets
from aitrain.environment.loader import EnvSource, errors_of, load_env, locate_environments
from aitrain.environment.requirements import with_largest, with_requirements
from aitrain.environment.runner import EnvRunner, MixedRunner, Runner, start_runner
from aitrain.errors import EnvironmentFailed
from aitrain.events import Announce, Note
from aitrain.options.train import TrainConfig

if TYPE_CHECKING:
    from aitrain.training.run_context import RunContext


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


def check_environments(context: RunContext, built: Mapping[str, Datasets]) -> None:
    """Check each environment, if the options ask for it, and note what was found. A finding does not end a run: the
    model may answer better than the scripted answers of the checks.

    Raises:
        EnvironmentFailed: in a dry run, every episode failed, so the run would end when it scores its held-out cases.
    """
    if not context.config.rl_check or activity.own.rank != 0:
        return
    from aitrain.workbench.check.before_training import check_quickly  # here, as only the first process needs it

    context.enter("checking the environment", moves_files=False)
    for name, runner in context.runner.parts.items():
        found = check_quickly(runner.environment, built[name][0], runner.config)
        for line in found.lines():
            context.note(f"{name}: {line}" if name else line, "info" if found.is_clean else "warning")
        if found.all_failed and context.dry_run_of:
            with errors_of(name):
                raise EnvironmentFailed(
                    f"Each of the {found.played} episodes that were tried failed: {found.all_failed}\n"
                    "A run whose held-out cases all fail ends before its first step. Try one: aitrain env play"
                )
