"""`aitrain schema`: JSON schemas of config files, for editors, and of what runs write, for programs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from aitrain.errors import ConfigError

WHAT = "config, the files of --config; events, the lines of --json; rollouts and metrics, the lines of a run folder."


def schema(
    what: Annotated[str, typer.Argument(metavar="[config|events|rollouts|metrics]", help=WHAT)] = "config",
) -> int:
    """Print a JSON schema: of the files that --config takes, of the events that --json writes, or of a run's records.

    For an editor, save the first one beside the file, with `aitrain schema > config.schema.json`, and begin the file
    with the line

    # yaml-language-server: $schema=config.schema.json
    """
    from aitrain.events import events_schema
    from aitrain.options.schema import json_schema  # here, because help needs neither
    from aitrain.options.train import TrainConfig
    from aitrain.runs.record_schemas import metrics_schema, rollouts_schema

    schemas = {
        "config": lambda: json_schema(TrainConfig),
        "events": events_schema,
        "rollouts": rollouts_schema,
        "metrics": metrics_schema,
    }
    if what not in schemas:
        raise ConfigError(f"There is no schema of {what}: use one of {', '.join(schemas)}")
    typer.echo(json.dumps(schemas[what](), indent=2))
    return 0
