"""An option as flags, help and docs need it; the JSON schema of a file of options, for editors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache

from aitrain.options.section import RESUME_SAFE, Options, descriptions, option_names, sections_of
from aitrain.options.value_types import REPEATED, TABLES, leaves

_TYPE_NAMES = {bool: "switch", dict[str, object]: "JSON object", float: "number", int: "integer", str: "text"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Option:
    """One option of a job."""

    name: str
    flag: str
    """`--rl-num-generations`."""
    section: str
    type_name: str
    """switch, integer, number, text or JSON object."""
    values: str
    """What may follow the flag: `integer, at least 2`, `colocate, server`, `on, off, N`."""
    choices: tuple[str, ...]
    """The values that it may have; empty where it is not a choice."""
    default: object
    resume_safe: bool
    """Whether a resumed run may have another value."""
    description: str

    @property
    def placeholder(self) -> str:
        """What follows the flag in its help: `INTEGER`, `KEY=VALUE`, `colocate|server`."""
        if self.name in TABLES:
            return "KEY=VALUE"
        return self.values.replace(", ", "|") if self.choices else self.type_name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value, and a `--no-` form."""
        return self.type_name == "switch"

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be repeated."""
        return self.name in REPEATED

    @property
    def shown_default(self) -> str:
        """The default as it would be typed."""
        if self.is_switch:
            return "on" if self.default else "off"
        return "unset" if self.default is None else str(self.default)


@cache
def options_of(job: type[Options]) -> tuple[Option, ...]:
    """Every option of a job, section by section."""
    titles = {name: section.section for section in sections_of(job) for name in section.model_fields}
    fields, options = job.model_fields, []
    for name in option_names(job):
        field, parts = fields[name], leaves(fields[name].annotation)
        choices = tuple(part for part in parts if isinstance(part, str))
        type_name = "text" if choices else next(text for kind, text in _TYPE_NAMES.items() if kind in parts)
        numbers = ("N",) if choices and int in parts else ()
        bounds = [
            f"{text} {getattr(part, bound)}"
            for part in (*parts, *field.metadata)
            for bound, text in _BOUNDS.items()
            if hasattr(part, bound)
        ]
        options.append(
            Option(
                name,
                "--" + name.replace("_", "-"),
                titles[name],
                type_name,
                ", ".join((*choices, *numbers) or (type_name, *bounds)),
                choices,
                field.default,
                RESUME_SAFE in field.metadata,
                descriptions(job).get(name, ""),
            )
        )
    return tuple(options)


def options_with(job: type[Options], words: Collection[str]) -> list[Option]:
    """The options that have all of the words in their name, section or description."""
    wanted = [word.lstrip("-").lower() for word in words]
    return [
        one
        for one in options_of(job)
        if all(word in " ".join(map(str, asdict(one).values())).lower() for word in wanted)
    ]


# -- JSON schema

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
