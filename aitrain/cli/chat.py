"""`aitrain chat`: talk to a model and to what it was before the training, side by side."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from typing import Annotated

import typer

from aitrain.cli.completion import run_names
from aitrain.cli.flags import Flag, given_flags, with_options
from aitrain.options.chat import ChatConfig
from aitrain.options.documentation import help_text

SHOWN = {*ChatConfig.model_fields} - {"rl_check", "rl_max_failed", "rl_env_episodes", "rl_env_weights"}
"""Options without those that mean nothing in a chat."""


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        typer.echo(HELP + help_text(ChatConfig, min(100, shutil.get_terminal_size().columns), SHOWN))
        raise typer.Exit()


HELP = """\
Usage: aitrain chat [OPTIONS] MODEL

  Talk to the model of a run and to its base, side by side in the terminal:

    aitrain chat runs/sums

  MODEL is a run folder, a checkpoint, an adapter, a model folder, a Hub name, or tiny. Questions
  from a pipe get one line each: echo "2 + 2 = ?" | aitrain chat runs/sums

Command:
  --only base|tuned
        Talk to one of the two.
  --system TEXT
        Begin with this system prompt.
  --case N
        Begin with this case of the run's environment: its prompt, its tools, and its score.
  --greedy
        Take the likeliest token each time.
  --seed INTEGER
        Seed of the answers, and of the cases. [0]
  --json
        Print answers to a pipe as JSON, one object a line.
  -h, --help
        Show this. Options of the run stay as they were, unless they are given here.

"""


@with_options(ChatConfig, SHOWN)
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=run_names)],
    *,
    only: Annotated[str | None, typer.Option("--only", autocompletion=lambda: ["base", "tuned"])] = None,
    system: Annotated[str, typer.Option("--system")] = "",
    case: Annotated[str | None, typer.Option("--case")] = None,
    greedy: Annotated[bool, typer.Option("--greedy")] = False,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Flag,
) -> int:
    """Talk to a trained model and its base, side by side."""
    from aitrain.cli.env_process import limit_threads, run_on_terminal  # here, because help needs none of it
    from aitrain.runs.chat_setup import ChatSetup, chat_options

    given = given_flags(flags)
    request = ChatSetup(model, chat_options(model, only, given), only, system, case, greedy, seed, as_json)
    config = request.config
    if case is not None:
        from aitrain.environment.loader import find_environments

        find_environments(config)
    limit_threads(config.model)
    limit = config.rl_max_new_tokens if "rl_max_new_tokens" in given else None
    return run_on_terminal("aitrain.jobs.chat", asdict(replace(request, answer_tokens=limit)))
