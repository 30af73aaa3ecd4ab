"""`aitrain chat`: talk to a model and to what it was before the training, side by side."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, Flag, given_flags, run_names, with_options
from aitrain.options.generation import GenerationOptions


@with_options(GenerationOptions)
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
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Talk to a trained model and its base, side by side.

    Questions from a pipe get one line each: echo "2 + 2 = ?" | aitrain chat runs/sums. Options of the run stay as they
    were, unless they are given here.
    """
    from aitrain.cli.terminal_process import limit_threads, run_on_terminal
    from aitrain.runs.chat_setup import ChatSetup, chat_options

    given = given_flags(flags)
    request = ChatSetup(model, chat_options(model, only, given), only, system, greedy, seed, as_json)
    limit_threads(request.config.model)
    limit = request.config.rl_max_new_tokens if "rl_max_new_tokens" in given else None
    return run_on_terminal("aitrain.jobs.chat", asdict(replace(request, answer_tokens=limit)))
