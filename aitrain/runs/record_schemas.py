"""JSON schemas (draft 2020-12) of the lines of rollouts/ and metrics.jsonl."""

from __future__ import annotations

from typing import Any

from aitrain.options.section import field_docstrings
from aitrain.runs.metrics_line import LINE, MetricsLine
from aitrain.runs.rollout_record import RECORD, RolloutRecord


def rollouts_schema() -> dict[str, object]:
    """Of the record of an episode; fields that say nothing about it are left out."""
    return _described(RolloutRecord, RECORD.json_schema(), "Rollout record")


def metrics_schema() -> dict[str, object]:
    """Of a metrics line: named numbers, and others by the names of what they measure."""
    found = _described(MetricsLine, LINE.json_schema(), "Metrics line")
    del found["properties"]["values"]
    return found | {"required": ["schema", "step"], "additionalProperties": {"type": ["number", "null"]}}


def _described(kind: type, schema: dict[str, Any], title: str) -> dict[str, Any]:
    for name, text in field_docstrings(kind).items():
        schema["properties"][name]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title, "required": ["step"]}
