"""The process of `aitrain env play`, `show` and `rescore`: `python -m aitrain.jobs.env_terminal FILE`.

FILE holds the request as JSON. The process has the terminal of the command, so that breakpoint() and input() work in
the environment.
"""

from __future__ import annotations

import copy
import json
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from aitrain.errors import ConfigError
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.user_code import failure_message
from aitrain.jobs.terminal_job import exit_now, run_job
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.runs.run_folder import RunFolder, to_jsonable
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.opening import open_environment, open_environments
from aitrain.workbench.play import ModelView, PlayOptions, play, written_rollout

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Request = dict[str, Any]
Document = dict[str, object]
"""What `--json` prints."""
NO_DEADLINE = 1e9
"""Seconds of a call of the environment, which may wait in the debugger."""


def main(request: Request) -> int:
    """Do what the request says; returns the exit code."""
    as_json = request[request["command"]].get("as_json", False)

    def work() -> int:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # also what the environment prints
            document = COMMANDS[request["command"]](request)
        if as_json:
            print(json.dumps(to_jsonable(document), indent=2))
        return 0

    return run_job(work, as_json)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _play(request: Request) -> Document:
    signal.signal(signal.SIGINT, _interrupt)  # at once: asyncio's own handler would wait for a person's answer
    options = PlayOptions(**request["play"])
    config = resolve(TrainConfig, None, {"rl_env_timeout": NO_DEADLINE, **request["options"]})
    tokenizer = LazyTokenizer(config)
    opened, config = open_environment(config, tokenizer)
    if options.policy == "model":
        from aitrain.jobs.env_model import policy_rollout  # here, because an environment that fails needs no torch

        rollout = policy_rollout(opened, config)
        return play(opened, rollout, options, ModelView(rollout.chat, config.model))
    return play(opened, written_rollout(opened, config, tokenizer, options), options, _view(config))


def _show(request: Request) -> Document:
    from aitrain.workbench.show import show

    config = resolve(TrainConfig, None, request["options"])
    opened, config = open_environment(config, LazyTokenizer(config))
    try:
        return show(opened, _view(config), **request["show"])
    finally:
        close = getattr(opened.environment, "close", None)
        try:
            if callable(close):
                run_if_async(close())
        except Exception as error:  # the command has done its work
            message = failure_message(f"{type(opened.environment).__name__}.close raised", error)
            print(f"aitrain: {escape_controls(message)}", file=sys.stderr)


def _rescore(request: Request) -> Document:
    from aitrain.runs.rollout_index import RolloutIndex
    from aitrain.workbench.rescore import RescoredEpisode, report, rescore, show_report

    wanted = request["rescore"]
    index = RolloutIndex(RunFolder(Path(wanted["run"])).rollouts)
    index.refresh()
    steps = {entry.step for entry in index.entries if not entry.eval_phase}
    step = max(steps, default=0) if wanted["last"] else wanted["step"]
    wanted_ones = (entry for entry in index.entries if step is None or (entry.step == step and not entry.eval_phase))
    entries = sorted(wanted_ones, key=lambda entry: entry.group_key)
    if not entries:
        raise ConfigError(f"{wanted['run']} has no rollouts" + ("" if step is None else f" of training step {step}"))
    config = resolve(TrainConfig, None, request["options"])
    tokenizer = LazyTokenizer(config)
    episodes: list[RescoredEpisode] = []
    for name, (opened, own) in open_environments(config, tokenizer).items():
        of_env = (index.record(entry) for entry in entries if name in ("", entry.environment))
        episodes += rescore(opened, own, tokenizer, of_env)
    found = report(episodes, wanted["most"], config.env_shares)
    if not wanted["as_json"]:
        show_report(Console(highlight=False), found)
    return found


def _serve(request: Request) -> Document:
    from aitrain.jobs.env_server import serve_environment

    config = resolve(TrainConfig, None, request["options"])
    tokenizer = LazyTokenizer(config)
    serve_environment(
        config, tokenizer, lambda: tokenizer.is_loaded, (request["serve"]["host"], request["serve"]["port"])
    )
    return {}


def _view(config: TrainConfig) -> ModelView:
    """The chat format of the model that the options name, of which only the tokenizer is loaded."""
    if config.model == "tiny":
        from aitrain.jobs.tiny_tokenizer import TinyTokenizer

        return ModelView(ChatFormat(TinyTokenizer()), config.model)
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.model import load_tokenizer

    return ModelView(chat_format(load_tokenizer(config), config), config.model)


class LazyTokenizer:
    """The `tokenizer` argument of an environment: loaded when it is used, as most environments only take it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def is_loaded(self) -> bool:
        """Whether it was used."""
        return "_loaded" in self.__dict__

    @cached_property
    def _loaded(self) -> PreTrainedTokenizerBase:
        from aitrain.training.model import load_tokenizer

        return load_tokenizer(self._config)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded, name)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        """The tokenizer's own call."""
        return self._loaded(*arguments, **keywords)

    def __len__(self) -> int:
        return len(self._loaded)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return copy.copy, (self._loaded,)  # worker processes get the tokenizer itself


COMMANDS: dict[str, Callable[[Request], Document]] = {
    "play": _play,
    "show": _show,
    "rescore": _rescore,
    "serve": _serve,
}


if __name__ == "__main__":
    exit_now(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
