"""The options of a run as its config.yaml holds them."""

from __future__ import annotations

from pathlib import Path

import yaml

from aitrain.runs.json_values import JsonObject

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A tenth of the time of the one in Python, which counts for a table of many runs."""


def read_options(config: Path) -> JsonObject:
    """The content of config.yaml, unchecked; empty if it cannot be read."""
    try:
        given = yaml.load(config.read_text(encoding="utf-8", errors="replace"), Loader=LOADER)
    except (OSError, yaml.YAMLError):
        return {}
    return given if isinstance(given, dict) else {}
