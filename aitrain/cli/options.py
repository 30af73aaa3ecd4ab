"""`aitrain options`: the options of a training, searched by words, and the JSON schemas of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Literal

import typer

from aitrain.cli.flags import AsJson, print_json
from aitrain.errors import ConfigError
from aitrain.events import events_schema
from aitrain.options.other_names import unknown_option
from aitrain.options.section import json_schema, options_of
from aitrain.options.train import TrainConfig
from aitrain.runs.records import LINE, RECORD


def metrics_schema() -> dict[str, object]:
    """Of a metrics line: named numbers, and others by the names of what they measure."""
    found = LINE.json_schema()
    del found["properties"]["values"]
    return found | {"required": ["schema", "step"], "additionalProperties": {"type": ["number", "null"]}}


SCHEMAS: dict[str, Callable[[], dict[str, object]]] = {
    "config": lambda: json_schema(TrainConfig),
    "events": events_schema,
    "rollouts": RECORD.json_schema,
    "metrics": metrics_schema,
}


def options(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Words of a name or a description; unset: all.")
    ] = None,
    *,
    schema: Annotated[
        Literal["config", "events", "rollouts", "metrics"] | None,
        typer.Option(
            metavar="WHAT",
            help="Print a JSON schema: of config, the files of --config; events, the lines of --json; rollouts or"
            " metrics, the lines of a run folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Search the options of aitrain grpo.

    Shows those whose name or description has all words. A name of TRL, AITraining or Unsloth finds the option that
    means the same. For an editor, save the schema of config beside the file, with `aitrain options --schema config >
    config.schema.json`, and begin the file with the line

    # yaml-language-server: $schema=config.schema.json
    """
    if schema is not None:
        print_json(SCHEMAS[schema]())
        return 0
    wanted = [word.lstrip("-").lower() for word in words or ()]
    found = [
        one
        for one in options_of(TrainConfig)
        if all(word in " ".join(map(str, asdict(one).values())).lower() for word in wanted)
    ]
    if not found:
        message = unknown_option(f"--{(words or [''])[0].lstrip('-')}", TrainConfig.model_fields)
        found = [option for option in options_of(TrainConfig) if f"{option.flag}." in message]
        if not found:
            raise ConfigError(f"No option has {' and '.join(words or [])} in its name or description.")
    if as_json:
        print_json([asdict(option) for option in found])
        return 0
    formatter = ctx.make_formatter()
    for section, its in groupby(found, lambda option: option.section):
        with formatter.section(section):
            formatter.write_dl(
                [
                    (
                        f"{one.flag} {'' if one.is_switch else one.placeholder}",
                        f"{one.description} [{one.shown_default}]",
                    )
                    for one in its
                ]
            )
    typer.echo(formatter.getvalue().strip("\n"))
    return 0
