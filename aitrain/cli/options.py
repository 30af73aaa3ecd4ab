"""`aitrain options`: the options of a training, searched by words, and the JSON schema of a file."""

from itertools import groupby
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, print_json
from aitrain.errors import ConfigError
from aitrain.options.other_names import unknown_option
from aitrain.options.section import options_of
from aitrain.options.train import TrainConfig


def options(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Words of a name or a description; unset: all.")
    ] = None,
    *,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the files of --config.")] = False,
    as_json: AsJson = False,
) -> int:
    """Search the options of aitrain grpo.

    Shows those whose name or description has all words. For a name of TRL, AITraining or Unsloth, it says which option
    means the same. For an editor, save the schema beside the file, with `aitrain options --schema >
    config.schema.json`, and begin the file with the line

    # yaml-language-server: $schema=config.schema.json
    """
    if schema:
        print_json(TrainConfig.model_json_schema())
        return 0
    wanted = [word.lstrip("-").lower() for word in words or ()]
    found = [
        one
        for one in options_of(TrainConfig)
        if all(word in f"{one.flag} {one.name} {one.description}".lower() for word in wanted)
    ]
    if not found:
        raise ConfigError(unknown_option("_".join(wanted), TrainConfig.model_fields))
    if as_json:
        print_json(list(map(vars, found)))
        return 0
    formatter = ctx.make_formatter()
    for section, its in groupby(found, lambda option: option.section):
        with formatter.section(section):
            formatter.write_dl(
                [(f"{one.flag} {one.placeholder}", f"{one.description} [{one.shown_default}]") for one in its]
            )
    typer.echo(formatter.getvalue().strip("\n"))
    return 0
