"""The process of `aitrain env play`, `show`, `rescore` and `serve`, started as ui/output.py says.

The process has the terminal of the command, so that breakpoint() and input() work in
the environment.
"""

from __future__ import annotations

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
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from aitrain.environment.contract import env_kind, scores_groups
from aitrain.environment.dataset import fingerprint
from aitrain.environment.env_service import EnvService
from aitrain.environment.loader import load_env
from aitrain.environment.requirements import requirements_of
from aitrain.environment.runner import AbsentModel, EnvRunner, start_runner
from aitrain.environment.served_environment import PROTOCOL, EnvDescription
from aitrain.environment.session import Message
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
from aitrain.workbench.play import ModelView, PlayOptions, play, written_rollout

Request = dict[str, Any]
Document = dict[str, object]
"""What `--json` prints."""
NO_DEADLINE = 1e9
"""Seconds of a call of the environment, which may wait in the debugger."""

NO_MODEL = AbsentModel(why="it is where it is trained; an environment that asks it cannot be served")

Say = Callable[[str], object]


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
    options = PlayOptions(**request["play"])
    config = resolve(TrainConfig, None, {"rl_env_timeout": NO_DEADLINE, **request["options"]})
    tokenizer = LazyTokenizer(config)
    opened, config = open_environment(config, tokenizer)
    if options.policy == "model":
        rollout = _policy_rollout(opened, config)
        return play(opened, rollout, options, ModelView(rollout.chat, config.model))
    return play(opened, written_rollout(opened, config, tokenizer, options), options, _view(config))


def _policy_rollout(opened: OpenedEnvironment, config: TrainConfig) -> Rollout:
    """Rollouts with the model of the options, with the engine, limits and episodes of a run."""
    from aitrain.engines.proxy_batcher import offer_model  # here, because an environment that fails needs no torch
    from aitrain.rollout.limits import limits_of
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.dataset import shown_episodes
    from aitrain.training.loaded_policy import load_policy

    policy = load_policy(read_model(config.model), config)
    is_chat = opened.cases[0].is_chat or env_kind(opened.environment) == "rollout"
    _, chat = shown_episodes(opened.environment, chat_format(policy.tokenizer, config), is_chat)
    runner = start_runner(opened.environment, config)
    scoring = offer_model(runner, policy.model, chat.tokenizer)
    return Rollout(runner, policy.engine(), chat, limits_of(runner, policy.context), policy.end, scoring)


def _show(request: Request) -> Document:
    from aitrain.workbench.show import show

    config = resolve(TrainConfig, None, request["options"])
    opened, config = open_environment(config, LazyTokenizer(config))
    with closing(EnvRunner(opened.environment, config)):  # which closes the environment
        return show(opened, _view(config), **request["show"])


def _rescore(request: Request) -> Document:
    from aitrain.workbench.rescore import RescoredEpisode, report, rescore, show_report

    wanted = request["rescore"]
    step = wanted["step"]
    config = resolve(TrainConfig, None, request["options"])
    tokenizer = LazyTokenizer(config)
    first, episodes = 0, list[RescoredEpisode]()
    for name, own in config.environments.items():
        with errors_of(name):
            opened, own = open_environment(own, tokenizer, load_env(own, name))
        records = (
            record
            for record in read_rollouts(Path(wanted["run"]))
            if name in ("", record.environment) and (step is None or (record.step == step and not record.eval_phase))
        )
        episodes += rescore(opened, own, tokenizer, records, first)
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
    environment, is_given = load_env(config), "rl_env_isolation" in config.model_fields_set
    seed()
    opened, config = open_environment(config, tokenizer, environment)
    if not is_given and requirements_of(environment).isolation is None:
        config = config.model_copy(update={"rl_env_isolation": "process"})
    description = describe(opened, config, config.model if tokenizer.is_loaded else None)
    runner = start_runner(environment, config, is_watched=False)
    runner.notify = say
    runner.offer(NO_MODEL, tokenizer)
    if opened.note:
        say(opened.note)
    with closing(runner):
        service = EnvService(runner, opened.all_cases, description, **request["serve"])
        asyncio.run(_serve_until_stopped(service, say))
    return {}


async def _serve_until_stopped(service: EnvService, say: Say) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, service.stop.set)
    one = service.description
    held_out = "" if one.held_out is None else f", {len(one.held_out)} held-out ones"

    def on_ready(url: str) -> None:
        say(f"{one.name}: {len(one.rows)} cases{held_out}. Ctrl-C ends the server.")
        say(f"Train on it with: aitrain grpo --rl-env {url}")

    try:
        await service.serve(on_ready)
    except OSError as error:
        raise ConfigError(f"--host {service.host} --port {service.port}: {error.strerror or error}") from error


def describe(opened: OpenedEnvironment, config: TrainConfig, tokenizer: str | None) -> EnvDescription:
    """The description of an environment for clients; `tokenizer` names the model of the tokenizer, None without one."""
    environment = opened.environment
    kind = env_kind(environment)
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
        protocol=PROTOCOL,
        id=hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32],
        name=type(environment).__name__,
        kind=kind,
        rows=rows,
        held_out=held_out or None,
        scores_groups=scores_groups(environment),
        sees_thoughts=getattr(environment, "sees_thoughts", False) is True,
        tools=replace(Tools.of(environment), by_name={}) if hasattr(environment, "get_tools") else None,
        requires=requirements_of(environment),
        tokenizer=tokenizer,
        facts=facts,
        source=tuple(dict(file) for file in kept_files(environment)),
    )


def _view(config: TrainConfig) -> ModelView:
    """The chat format of the model that the options name, of which only the tokenizer is loaded."""
    if config.model == "tiny":
        return ModelView(ChatFormat(tiny_tokenizer()), config.model)
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.model import load_tokenizer

    return ModelView(chat_format(load_tokenizer(config), config), config.model)


def tiny_tokenizer() -> Any:
    """The tokenizer of the bundled model without transformers, whose import takes seconds: renders and encodes as the
    tokenizer that transformers makes of the same files."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    jinja.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # Jinja's own escapes HTML
    template = jinja.from_string((TINY_FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))

    def render(messages: list[Message], **options: object) -> str:
        return template.render(**{"tools": None, **options}, messages=messages)

    return SimpleNamespace(
        encode=lambda text, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids,
        apply_chat_template=render,
    )


COMMANDS: dict[str, Callable[[Request], Document]] = {
    "play": _play,
    "show": _show,
    "rescore": _rescore,
    "serve": _serve,
}
