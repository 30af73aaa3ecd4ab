"""`aitrain chat`: talk to a model and to what it was before the training, side by side."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, Flag, given_flags, run_names, with_options
from aitrain.options.environment import EnvironmentOptions
from aitrain.options.generation import GenerationOptions


class ChatConfig(EnvironmentOptions, GenerationOptions):
    """The options of a run that a chat may change: the environment of its cases, and how answers are sampled."""


SHOWN = {*ChatConfig.model_fields} - {"rl_check", "rl_max_failed", "rl_env_episodes", "rl_env_weights"}
"""Options without those that mean nothing in a chat."""


@with_options(ChatConfig, SHOWN)
def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=run_names,
            help="A run folder, a checkpoint, an adapter, a model folder, a Hub name, or tiny.",
        ),
    ],
    *,
    only: Annotated[
        str | None, typer.Option(metavar="base|tuned", autocompletion=lambda: ["base", "tuned"], help="One of the two.")
    ] = None,
    system: Annotated[str, typer.Option(help="Begin with this system prompt.")] = "",
    case: Annotated[
        str | None, typer.Option(help="Begin with this case of the run's environment: its prompt, tools and score.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the answers, and of the cases.")] = 0,
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Talk to a trained model and its base, side by side.

    Questions from a pipe get one line each: echo "2 + 2 = ?" | aitrain chat runs/sums. Options of the run stay as they
    were, unless they are given here.
    """
    from aitrain.cli.terminal_process import limit_threads, run_on_terminal
    from aitrain.environment.loader import find_environments
    from aitrain.runs.chat_setup import ChatSetup, chat_options

    given = given_flags(flags)
    request = ChatSetup(model, chat_options(model, only, given), only, system, case, greedy, seed, as_json)
    config = request.config
    if case is not None:
        find_environments(config)
    limit_threads(config.model)
    limit = config.rl_max_new_tokens if "rl_max_new_tokens" in given else None
    return run_on_terminal("aitrain.jobs.chat", asdict(replace(request, answer_tokens=limit)))
