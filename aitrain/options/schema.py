"""The JSON schema of a job's YAML file (draft 2020-12), for editors."""

from __future__ import annotations

from functools import cache

from aitrain.options.section import Options, build, descriptions, option_names

DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, object]


@cache
def json_schema(job: type[Options]) -> Schema:
    """The schema: every option with its description, default and values, and no other key. A run writes it twice, and
    making it takes as long as an optimizer step of the tiny model."""
    build(job)
    made = job.model_json_schema()["properties"]
    properties = {name: {"description": descriptions(job)[name], **_property(made[name])} for name in option_names(job)}
    return {
        "$schema": DRAFT,
        "title": f"Options of {job.__name__}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(made: Schema) -> Schema:
    """pydantic's schema of a field without its title, and with blank text refused as in a file."""
    stated = {key: value for key, value in made.items() if key not in ("title", "description")}
    if isinstance(choices := stated.get("anyOf"), list):
        stated["anyOf"] = [_property(choice) for choice in choices]
    is_free_text = stated.get("type") == "string" and stated.keys().isdisjoint({"enum", "pattern"})
    return {**stated, "pattern": r"\S"} if is_free_text else stated
