"""`aitrain env`: the environment workbench, one module for each command."""

from __future__ import annotations

import typer

from aitrain.cli.lazy_group import LazyGroup

ENV_COMMANDS = {
    "init": "Write a new environment with its test: one readable file to edit.",
    "check": "Find what is wrong with an environment before it costs a run.",
    "play": "Play episodes: you, a script or a model answer turn by turn.",
    "show": "Show sample cases as the model sees them.",
    "list": "List the environments that can be named with --rl-env.",
    "serve": "Serve an environment to trainings on other machines.",
    "rescore": "Apply today's scorer to the saved episodes of a run.",
}
"""The commands with their short help; command `x` is the function `env_x` of `aitrain.cli.env_x`."""


class EnvGroup(LazyGroup):
    """The commands of `aitrain env`."""

    prefix = "env_"


env = typer.Typer(
    cls=EnvGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for _name, _sentence in ENV_COMMANDS.items():
    env.command(_name, short_help=_sentence)(lambda: None)


@env.callback()
def _group() -> None:
    """Write, check, play and inspect environments.

    An environment is named as in --rl-env: path/to/file.py:Class, package.module:Class, or envs.gsm8k.
    """
