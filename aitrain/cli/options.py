"""`aitrain options`: the options of a training, searched by words."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from aitrain.errors import ConfigError


def options(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Words of a name or a description; unset: all.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON, with types and defaults.")] = False,
) -> int:
    """Search the options of aitrain grpo.

    Shows those whose name or description has all words. A name of TRL, AITraining or Unsloth finds the option that
    means the same.
    """
    from aitrain.options.documentation import (  # these here, because help needs none of them
        as_entry,
        help_text,
        options_with,
    )
    from aitrain.options.option import options_of
    from aitrain.options.other_names import unknown_option
    from aitrain.options.train import TrainConfig

    found = options_with(TrainConfig, words or [])
    if not found:
        message = unknown_option(f"--{(words or [''])[0].lstrip('-')}", TrainConfig.model_fields)
        found = [name for name in TrainConfig.model_fields if f"--{name.replace('_', '-')}." in message]
        if not found:
            raise ConfigError(f"No option has {' and '.join(words or [])} in its name or description.")
    if as_json:
        entries = [as_entry(option) for option in options_of(TrainConfig) if option.name in found]
        typer.echo(json.dumps(entries, indent=2))
        return 0
    typer.echo(help_text(TrainConfig, min(100, shutil.get_terminal_size().columns), found))
    return 0
