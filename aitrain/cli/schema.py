"""`aitrain schema`: the JSON schema of config files, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from aitrain.errors import ConfigError

WHAT = "config, the files of --config, or events, the lines that --json writes."


def schema(what: Annotated[str, typer.Argument(metavar="[config|events]", help=WHAT)] = "config") -> int:
    """Print a JSON schema: of the files that --config takes, or of the events that --json writes.

    For an editor, save the first one beside the file, with `aitrain schema > config.schema.json`, and begin the file
    with the line

    # yaml-language-server: $schema=config.schema.json
    """
    from aitrain.events import events_schema
    from aitrain.options.schema import json_schema  # here, because help needs neither
    from aitrain.options.train import TrainConfig

    schemas = {"config": lambda: json_schema(TrainConfig), "events": events_schema}
    if what not in schemas:
        raise ConfigError(f"There is no schema of {what}: use one of {', '.join(schemas)}")
    typer.echo(json.dumps(schemas[what](), indent=2))
    return 0
