"""The process of `aitrain env play`, `show` and `rescore`: `python -m aitrain.jobs.env_terminal FILE`.

FILE holds the request as JSON. The process has the terminal of the command, so that breakpoint() and input() work in
the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from aitrain.environment.requirements import with_requirements
from aitrain.errors import AitrainError, Interrupted
from aitrain.execution.async_calls import run_if_async
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.redaction import redact
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.model_view import ModelView
from aitrain.workbench.opening import OpenedEnvironment, build_cases, construct

Request = dict[str, Any]


def main(request: Request) -> int:
    """Do what the request says; returns the exit code."""
    try:
        return COMMANDS[request["command"]](request)
    except KeyboardInterrupt:
        print()
        return Interrupted.exit_code
    except AitrainError as error:
        print(f"aitrain: {escape_controls(redact(str(error)))}", file=sys.stderr)
        return error.exit_code


def _play(request: Request) -> int:
    from aitrain.workbench.play import PlayOptions, play

    config, opened, view = _open(request)
    try:
        return play(opened, config, view, PlayOptions(**request["play"]))
    finally:
        _close(opened.environment)


def _show(request: Request) -> int:
    from aitrain.workbench.show import show

    _, opened, view = _open(request)
    try:
        return show(opened, view, **request["show"])
    finally:
        _close(opened.environment)


def _open(request: Request) -> tuple[TrainConfig, OpenedEnvironment, ModelView]:
    """The options with what the environment requires, the environment with its cases, and a model's view of them."""
    config = resolve(TrainConfig, None, request["options"])
    environment = construct(config)
    config, _ = with_requirements(config, environment)
    view = _view(config)
    cases, held_out = build_cases(environment, view.chat.tokenizer)
    return config, OpenedEnvironment(environment, cases, held_out), view


def _view(config: TrainConfig) -> ModelView:
    """The view of the model that the options name; only its tokenizer is loaded."""
    from aitrain.training.chat_templates import chat_format
    from aitrain.training.model import load_tokenizer

    return ModelView(chat_format(load_tokenizer(config)), config.model)


def _close(environment: object) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        run_if_async(close())


COMMANDS: dict[str, Callable[[Request], int]] = {"play": _play, "show": _show}


def exit_now(code: int) -> NoReturn:
    """End the process also if a thread of the environment still runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
