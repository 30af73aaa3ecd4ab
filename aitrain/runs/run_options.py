"""The options of a run as its config.yaml holds them."""

from __future__ import annotations

from pathlib import Path

import yaml

from aitrain.options.yaml_text import LOADER, refuse_bombs
from aitrain.runs.json_values import JsonObject, read_whole


def read_options(config: Path) -> JsonObject:
    """The content of config.yaml, unchecked; empty if it cannot be read."""
    try:
        text = read_whole(config).decode("utf-8", errors="replace")
        refuse_bombs(text)
        given = yaml.load(text, Loader=LOADER)
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return given if isinstance(given, dict) else {}
