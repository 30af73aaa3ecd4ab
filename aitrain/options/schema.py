"""The JSON schema of a job's YAML file (draft 2020-12), for editors."""

from __future__ import annotations

from aitrain.options.section import Options, build, descriptions, option_names

DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, object]


def json_schema(job: type[Options]) -> Schema:
    """The schema: every option with its description, default and values, and no other key."""
    build(job)
    made = job.model_json_schema()["properties"]
    properties = {name: _property(made[name], descriptions(job)[name]) for name in option_names(job)}
    return {
        "$schema": DRAFT,
        "title": f"Options of {job.__name__}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(made: Schema, description: str) -> Schema:
    """pydantic's schema of a field, with our description for its title, and blank text refused as in a file."""
    stated = {key: value for key, value in made.items() if key not in ("title", "description")}
    choices = stated.get("anyOf")
    if isinstance(choices, list):
        stated["anyOf"] = [_not_blank(choice) for choice in choices]
    return {"description": description, **_not_blank(stated)}


def _not_blank(made: Schema) -> Schema:
    is_free_text = made.get("type") == "string" and made.keys().isdisjoint({"enum", "pattern"})
    return {**made, "pattern": r"\S"} if is_free_text else made
