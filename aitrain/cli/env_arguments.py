"""The arguments that name an environment, for the commands of `aitrain env`: ENV, --rl-env-config and -E."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from aitrain.errors import ConfigError

ENV_HELP = "Environment, as in --rl-env: path/to/file.py:Class, package.module:Class, envs.gsm8k, or NAME:ID."
CONFIG_HELP = "Keyword arguments of its constructor: a JSON object, or @file.json."
KEYWORD_HELP = "One keyword argument, as in -E size=100; JSON if it parses, else text. Repeatable; wins over the above."

EnvName = Annotated[str, typer.Argument(metavar="ENV", help=ENV_HELP)]
EnvConfig = Annotated[str | None, typer.Option("--rl-env-config", metavar="JSON", help=CONFIG_HELP)]
EnvKeywords = Annotated[list[str] | None, typer.Option("-E", "--env-arg", metavar="KEY=VALUE", help=KEYWORD_HELP)]


def env_options(env: str, config: str | None = None, keywords: Iterable[str] | None = None) -> dict[str, object]:
    """The options `rl_env` and `rl_env_config` of these arguments, for `options.reading.resolve`.

    Raises:
        ConfigError: a value cannot be read.
    """
    from aitrain.options.value_types import read_json_object  # here, because help needs no pydantic

    try:
        given = read_json_object(config)
    except ValueError as error:
        raise ConfigError(f"rl_env_config: {error}") from None
    values = {**(given if isinstance(given, dict) else {}), **dict(map(_key_and_value, keywords or ()))}
    return {"rl_env": env, **({"rl_env_config": values} if values else {})}


def _key_and_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"-E {text}: write KEY=VALUE, as in -E size=100")
    try:
        return key.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return key.strip(), value
