"""The process of `aitrain env play`, `show`, `rescore` and `serve`, started as ui/output.py says.

The process has the terminal of the command, so that breakpoint() and input() work in
the environment.
"""

import asyncio
import hashlib
import json
import random
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from aitrain.environment.adapters import SERVED
from aitrain.environment.dataset import fingerprint
from aitrain.environment.env_service import EnvService
from aitrain.environment.loader import find_env, load_env
from aitrain.environment.requirements import requirements_of
from aitrain.environment.served_environment import METHODS, EnvDescription
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, errors_of
from aitrain.jobs.env_check import LazyTokenizer
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.packages import TINY_FOLDER
from aitrain.redaction import to_jsonable, without_secrets
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.runs.environment_source import kept_files, source_facts
from aitrain.runs.model_reference import read_model
from aitrain.runs.records import read_rollouts
from aitrain.ui.output import run_job
from aitrain.workbench.opening import OpenedEnvironment, open_environment
from aitrain.workbench.play import play

Request = dict[str, Any]
Document = dict[str, object]
"""What `--json` prints."""
NO_DEADLINE = 1e9
"""Seconds of a call of the environment, which may wait in the debugger."""


def main(request: Request) -> int:
    """Do what the request says; returns the exit code."""
    as_json = request[request["command"]].get("as_json", False)

    def work() -> None:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # also what the environment prints
            document = COMMANDS[request["command"]](request)
        if as_json:
            print(json.dumps(to_jsonable(document), indent=2))

    return run_job(work, as_json)


def _play(request: Request) -> Document:
    # at once: asyncio replaces Python's own handler by one that would wait for a person's answer
    signal.signal(signal.SIGINT, lambda *of_signal: signal.default_int_handler(*of_signal))
    config = resolve(TrainConfig, None, request["options"])
    if find_env(config).adapter is not SERVED:  # whose server is waited for as long as a call may take
        config = config.model_copy(update={"rl_env_timeout": NO_DEADLINE})
    return play(open_environment(config, LazyTokenizer(config)), _policy_rollout, **request["play"])


def _policy_rollout(opened: OpenedEnvironment) -> Rollout:
    """Rollouts with the model of the options, with the engine, limits and episodes of a run."""
    from aitrain.engines.proxy_batcher import offer_model  # here, because an environment that fails needs no torch
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.dataset import shown_episodes
    from aitrain.training.loaded_policy import load_policy

    runner, config = opened.runner, opened.runner.config
    policy = load_policy(read_model(config.model), config)
    is_chat = opened.cases[0].is_chat or runner.kind == "rollout"
    _, chat = shown_episodes(runner.environment, chat_format(policy.tokenizer, config), is_chat)
    scoring = offer_model(runner, policy.model, chat.tokenizer)
    return Rollout(runner, policy.engine(), chat, policy.context, scoring)


def _show(request: Request) -> Document:
    from aitrain.workbench.show import show

    config = resolve(TrainConfig, None, request["options"])
    opened = open_environment(config, LazyTokenizer(config))
    with closing(opened.runner):
        return show(opened, chat_of(opened.runner.config), **request["show"])


def _rescore(request: Request) -> Document:
    from aitrain.workbench.rescore import SavedEpisode, report, rescore, show_report

    wanted = request["rescore"]
    step = wanted["step"]
    config = resolve(TrainConfig, None, request["options"])
    tokenizer = LazyTokenizer(config)
    first, episodes = 0, list[SavedEpisode]()
    for name, own in config.environments.items():
        with errors_of(name):
            opened = open_environment(own, tokenizer, load_env(own))
        records = (
            record
            for record in read_rollouts(Path(wanted["run"]))
            if name in ("", record.environment) and (step is None or (record.step == step and not record.eval_phase))
        )
        episodes += rescore(opened, records, first)
        first += len(opened.all_cases)
    if not episodes:
        raise ConfigError(f"{wanted['run']} has no rollouts" + ("" if step is None else f" of training step {step}"))
    found = report(episodes, wanted["most"])
    if not wanted["as_json"]:
        show_report(Console(highlight=False), found)
    return found


def _serve(request: Request) -> Document:
    """Serve the environment on a host and port until Ctrl-C or SIGTERM."""
    import numpy  # here, as the other commands do not need it

    config = resolve(TrainConfig, None, request["options"])
    tokenizer = LazyTokenizer(config)
    say = partial(print, flush=True)

    def seed() -> None:  # as a run does before it constructs the environment and before it builds rows
        random.seed(config.seed)
        numpy.random.seed(config.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(config.seed)

    seed()
    environment = load_env(config)
    if "rl_env_isolation" not in config.model_fields_set and requirements_of(environment).isolation is None:
        config = config.model_copy(update={"rl_env_isolation": "process"})
    seed()
    opened = open_environment(config, tokenizer, environment)
    description = describe(opened, config.model if tokenizer.is_loaded else None)
    runner = opened.runner
    runner.is_watched, runner.notify = False, say
    if opened.note:
        say(opened.note)
    with closing(runner):
        service = EnvService(runner, opened.all_cases, description, **request["serve"])
        asyncio.run(_serve_until_stopped(service))
    return {}


async def _serve_until_stopped(service: EnvService) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, service.stop.set)

    def on_ready(url: str) -> None:
        print(f"{service.description.name}: {len(service.cases)} cases. Ctrl-C ends the server.")
        print(f"Train on it with: aitrain grpo --rl-env {url}", flush=True)

    try:
        await service.serve(on_ready)
    except OSError as error:
        raise ConfigError(f"--host {service.host} --port {service.port}: {error.strerror or error}") from error


def describe(opened: OpenedEnvironment, tokenizer: str | None) -> EnvDescription:
    """The description of an environment for clients; `tokenizer` names the model of the tokenizer, None without one."""
    environment, config = opened.runner.environment, opened.runner.config
    facts: dict[str, Any] = {
        **source_facts(environment),
        "config": without_secrets(config.rl_env_config),
        "served_by_version": version("aitrain"),
    }
    datasets = opened.cases, opened.held_out
    hashes = map(fingerprint, datasets)
    identity = [facts["sha256"], facts["class"], json.dumps(config.rl_env_config, sort_keys=True), *hashes]
    rows, held_out = ([to_jsonable(case.row, redacts=False) for case in cases] for cases in datasets)
    return EnvDescription(
        protocol=8,
        id=hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32],
        name=type(environment).__name__,
        methods=[name for name in METHODS if callable(getattr(environment, name, None))],
        rows=rows,
        held_out=held_out,
        sees_thoughts=opened.runner.sees_thoughts,
        tools=replace(Tools.of(environment), by_name={}),
        requires=requirements_of(environment),
        tokenizer=tokenizer,
        facts=facts,
        source=tuple(dict(file) for file in kept_files(environment)),
    )


def chat_of(config: TrainConfig) -> ChatFormat:
    """The chat format of the model that the options name, of which only the tokenizer is loaded."""
    if config.model == "tiny":  # without what loads other models, whose import takes seconds
        from transformers import PreTrainedTokenizerFast

        return ChatFormat(PreTrainedTokenizerFast.from_pretrained(TINY_FOLDER))
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.model import load_tokenizer

    return chat_format(load_tokenizer(config), config)


COMMANDS: dict[str, Callable[[Request], Document]] = {
    "play": _play,
    "show": _show,
    "rescore": _rescore,
    "serve": _serve,
}
