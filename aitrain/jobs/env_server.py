"""The process of `aitrain env serve`: constructs the environment as a run does, and serves it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy

from aitrain.environment.contract import env_kind, named_by, scores_groups
from aitrain.environment.dataset import fingerprint
from aitrain.environment.env_service import EnvService
from aitrain.environment.requirements import requirements_of
from aitrain.environment.runner import NoModel, start_runner
from aitrain.environment.served_environment import PROTOCOL, EnvDescription
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.redaction import without_secrets
from aitrain.runs.environment_source import kept_files, source_facts
from aitrain.workbench.opening import OpenedEnvironment, construct, open_environment

NO_MODEL = NoModel("the model is where it is trained; an environment that asks it cannot be served")

Say = Callable[[str], object]
IsLoaded = Callable[[], bool]


def serve_environment(config: TrainConfig, tokenizer: object, is_loaded: IsLoaded, place: tuple[str, int]) -> None:
    """Serve the environment of the options on host and port until Ctrl-C or SIGTERM.

    `is_loaded` says whether the tokenizer was used.

    Raises:
        AitrainError: the environment cannot be constructed, or the port is taken.
    """
    say = partial(print, flush=True)

    def seed() -> None:  # as a run does before it constructs the environment and before it builds rows
        random.seed(config.seed)
        numpy.random.seed(config.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(config.seed)

    seed()
    environment, is_given = construct(config), "rl_env_isolation" in config.model_fields_set
    seed()
    opened, config = open_environment(config, tokenizer, environment)
    if not is_given and requirements_of(environment).isolation is None:
        config = config.model_copy(update={"rl_env_isolation": "process"})
    description = describe(opened, config, config.model if is_loaded() else None)
    runner = start_runner(environment, config, is_watched=False)
    runner.notify = say
    runner.offer(NO_MODEL, tokenizer)
    if "model" in (description.parameters or ()):
        say(f"{description.name}.{description.kind} names `model`, which a served environment does not have.")
    if opened.note:
        say(opened.note)
    with closing(runner):
        service = EnvService(runner, opened.all_cases, description, kept_files(environment), say, *place)
        asyncio.run(_serve(service, say))


async def _serve(service: EnvService, say: Say) -> None:
    signals = list[int]()

    def stop(number: int) -> None:
        signals.append(number)
        service.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    one = service.description
    held_out = "" if one.held_out is None else f", {one.held_out} held-out ones"

    def on_ready(url: str) -> None:
        say(f"{one.name}: {one.train} cases{held_out}. Ctrl-C ends the server.")
        say(f"Train on it with: aitrain grpo --rl-env {url}")

    try:
        await service.serve(on_ready)
    except OSError as error:
        raise ConfigError(f"--host {service.host} --port {service.port}: {error.strerror or error}") from error
    if signal.SIGINT in signals:
        raise KeyboardInterrupt


def describe(opened: OpenedEnvironment, config: TrainConfig, tokenizer: str | None) -> EnvDescription:
    """The description of an environment for clients; `tokenizer` names the model of the tokenizer, None without one."""
    environment = opened.environment
    kind = env_kind(environment)
    facts: dict[str, Any] = {
        **source_facts(environment),
        "config": without_secrets(config.rl_env_config or {}),
        "served_by_version": version("aitrain"),
    }
    rows = [fingerprint(cases) for cases in (opened.cases, opened.held_out)]
    identity = [facts["sha256"], facts["class"], json.dumps(config.rl_env_config, sort_keys=True), *rows]
    return EnvDescription(
        protocol=PROTOCOL,
        id=hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32],
        name=type(environment).__name__,
        kind=kind,
        parameters=named_by(getattr(environment, kind)),
        train=len(opened.cases),
        held_out=len(opened.held_out) or None,
        scores_groups=scores_groups(environment),
        sees_thoughts=getattr(environment, "sees_thoughts", False) is True,
        has_reference=callable(getattr(environment, "reference", None)),
        tools=Tools.of(environment).offer if hasattr(environment, "get_tools") else None,
        requires=requirements_of(environment),
        tokenizer=tokenizer,
        facts=facts,
    )
