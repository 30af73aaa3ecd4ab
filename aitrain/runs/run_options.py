"""The options of a run as its config.yaml holds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from aitrain.errors import ConfigError
from aitrain.options.yaml_text import LOADER, read_yaml, refuse_bombs
from aitrain.runs.json_values import JsonObject, read_whole


def read_options(config: Path) -> JsonObject:
    """The content of config.yaml, unchecked; empty if it cannot be read."""
    with suppress(ConfigError):
        return load_options(config, lambda text: yaml.load(text, Loader=LOADER))
    return {}


def load_options(config: Path, load: Callable[[str], object] = read_yaml) -> JsonObject:
    """The content of config.yaml.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = read_whole(config).decode("utf-8")
        refuse_bombs(text)
        loaded = load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"model: cannot read {config}: {' '.join(str(error).split())[:200]}") from None
    return {str(name): value for name, value in loaded.items()} if isinstance(loaded, dict) else {}
