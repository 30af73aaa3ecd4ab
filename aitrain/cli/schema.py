"""`aitrain schema`: the JSON schema of config files, for editors."""

from __future__ import annotations

import json

import typer


def schema() -> int:
    """Print the JSON schema of the files that --config takes, for completion and checks in an editor.

    Save it beside the file, with `aitrain schema > config.schema.json`, and begin the file with the line

    # yaml-language-server: $schema=config.schema.json
    """
    from aitrain.options.schema import json_schema  # here, because help needs neither
    from aitrain.options.train import TrainConfig

    typer.echo(json.dumps(json_schema(TrainConfig), indent=2))
    return 0
