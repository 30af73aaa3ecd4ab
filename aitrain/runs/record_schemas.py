"""JSON schemas (draft 2020-12) of the lines of rollouts/ and metrics.jsonl."""

from __future__ import annotations

from typing import Any

from aitrain.options.docstrings import field_docstrings
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.rollout_record import RolloutRecord

_NUMBER = {"type": ["number", "null"]}


def rollouts_schema() -> dict[str, object]:
    """Of the record of an episode; fields that say nothing about it are left out."""
    return _described(RolloutRecord, "Rollout record")


def metrics_schema() -> dict[str, object]:
    """Of a metrics line: named numbers, and others by the names of what they measure."""
    found = _described(MetricsLine, "Metrics line")
    properties = found["properties"]
    del properties["values"]
    return found | {"required": ["schema", "step"], "additionalProperties": _NUMBER}


def _described(kind: type, title: str) -> dict[str, Any]:
    from pydantic import TypeAdapter  # here, because reading records needs no pydantic

    found = TypeAdapter(kind).json_schema()
    for name, text in field_docstrings(kind).items():
        found["properties"][name]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found | {"title": title, "required": ["step"]}
