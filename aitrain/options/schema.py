"""The JSON schema of a job's YAML file (draft 2020-12), for editors."""

from __future__ import annotations

from functools import cache

from aitrain.options.section import Options, descriptions, option_names

DRAFT = "https://json-schema.org/draft/2020-12/schema"


@cache
def json_schema(job: type[Options]) -> dict[str, object]:
    """The schema: every option with its description, default and values, and no other key. A run writes it twice, and
    making it takes as long as an optimizer step of the tiny model."""
    made = job.model_json_schema()
    properties = {
        name: {**made["properties"][name], "description": descriptions(job)[name]} for name in option_names(job)
    }
    return {"$schema": DRAFT, **made, "title": f"Options of {job.__name__}", "properties": properties}
