"""`aitrain env check`: find what is wrong with an environment before it costs a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.env_arguments import EnvConfig, EnvKeywords, EnvName, env_options
from aitrain.errors import AitrainError
from aitrain.ui.loading import loading

if TYPE_CHECKING:
    from aitrain.workbench.check.process import Message


def env_check(
    env: EnvName,
    rl_env_config: EnvConfig = None,
    env_arg: EnvKeywords = None,
    *,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Run these checks only, such as floor,tools.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Model whose tokenizer renders the prompts; or `tiny`.")] = None,
    model: Annotated[str | None, typer.Option(help="Model that answers some cases: do its scores differ?")] = None,
    rl_score_range: Annotated[str | None, typer.Option(help="Lowest and highest score, as in -1,1; or any.")] = None,
    rl_max_turns: Annotated[int | None, typer.Option(help="Maximum number of turns in one episode.", min=1)] = None,
    rl_max_new_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of one answer.", min=1)] = None,
    rl_env_timeout: Annotated[float | None, typer.Option(help="Deadline in seconds of one call.")] = None,
    rl_env_isolation: Annotated[str | None, typer.Option(help="Where calls run: thread or process.")] = None,
    ask_judges: Annotated[
        bool, typer.Option("--ask-judges", help="Ask judges behind an address, which may cost something.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show what is only worth knowing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of lines.")] = False,
) -> int:
    """Find what is wrong with an environment before it costs a run.

    Exit code 3 if a check failed, else 0.
    """
    options = {
        "rl_score_range": rl_score_range,
        "rl_max_turns": rl_max_turns,
        "rl_max_new_tokens": rl_max_new_tokens,
        "rl_env_timeout": rl_env_timeout,
        "rl_env_isolation": rl_env_isolation,
        "model": model or tokenizer,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with loading("reading the environment"):
        from aitrain.cli.env_process import limit_threads  # here, because help needs none of it
        from aitrain.environment.loader import find_environments
        from aitrain.launch.processes import on_stop_signals
        from aitrain.options.reading import resolve
        from aitrain.options.train import TrainConfig
        from aitrain.workbench.check.process import PATIENCE, messages_of
        from aitrain.workbench.check.report import as_json as report_as_json
        from aitrain.workbench.check.report import exit_code, lines

        config = resolve(TrainConfig, None, env_options(env, rl_env_config, env_arg) | given)
        find_environments(config)
    if model is not None:
        limit_threads(model)
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    request = {"options": config.changed(), "only": names, "answers": model is not None, "ask_judges": ask_judges}
    module = "aitrain.jobs.env_model" if model or tokenizer else "aitrain.workbench.check.process"
    received = messages_of(module, request, PATIENCE + config.rl_env_timeout)
    messages: list[Message] = []
    with on_stop_signals(signal.default_int_handler):
        if as_json:
            messages += received
            typer.echo(report_as_json(messages))
            return exit_code(messages)
        for line in lines(_kept(received, messages), verbose):
            typer.echo(line)
    for message in messages:
        if "error" in message:
            error = AitrainError(message["error"])
            error.exit_code = message["exit_code"]
            raise error
    return exit_code(messages)


def _kept(received: Iterator[Message], messages: list[Message]) -> Iterator[Message]:
    """The messages as they arrive, collected in the list."""
    text = "opening the environment"
    while True:
        with loading(text):
            message = next(received, None)
        if message is None:
            return
        messages.append(message)
        yield message
        text = "checking"
