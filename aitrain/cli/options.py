"""`aitrain options`: the options of a training, searched by words, and the JSON schema of their files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, print_json, write_options
from aitrain.errors import ConfigError
from aitrain.options.option import json_schema, options_of, options_with
from aitrain.options.other_names import unknown_option
from aitrain.options.train import TrainConfig


def options(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD...", help="Words of a name or a description; unset: all.")
    ] = None,
    *,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the files of --config, for editors.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Search the options of aitrain grpo.

    Shows those whose name or description has all words. A name of TRL, AITraining or Unsloth finds the option that
    means the same. For an editor, save the schema beside the file, with `aitrain options --schema >
    config.schema.json`, and begin the file with the line

    # yaml-language-server: $schema=config.schema.json
    """
    if schema:
        print_json(json_schema(TrainConfig))
        return 0
    found = options_with(TrainConfig, words or [])
    if not found:
        message = unknown_option(f"--{(words or [''])[0].lstrip('-')}", TrainConfig.model_fields)
        found = [option for option in options_of(TrainConfig) if f"{option.flag}." in message]
        if not found:
            raise ConfigError(f"No option has {' and '.join(words or [])} in its name or description.")
    if as_json:
        print_json([asdict(option) for option in found])
        return 0
    from aitrain.cli.main import load_command

    names, formatter = {option.name for option in found}, ctx.make_formatter()
    write_options(ctx, formatter, [one for one in load_command("grpo").params if one.name in names])
    typer.echo(formatter.getvalue().strip("\n"))
    return 0
