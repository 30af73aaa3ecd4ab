"""An option as flags, help and docs need it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic.fields import FieldInfo

from aitrain.options.section import RESUME_SAFE, Options, descriptions, option_names, sections_of
from aitrain.options.value_types import TABLES

_TYPE_NAMES = {
    bool: "switch",
    int: "integer",
    float: "number",
    str: "text",
    list[str]: "text",
    str | list[str]: "text",
    int | str: "integer or ray:N",
}


@dataclass(frozen=True)
class Option:
    """One option of a job."""

    name: str
    job: type[Options]
    section: str
    default: object
    type_name: str
    """switch, integer, number, text or JSON object; empty for a choice."""
    bounds: str
    """`, at least 2`, or empty."""
    choices: tuple[str, ...]
    """The values that it may have; empty where it is not a choice."""
    resume_safe: bool
    """Whether a resumed run may have another value."""

    @property
    def description(self) -> str:
        """Its docstring; read from the source, which takes a tenth of the time of a light command."""
        return descriptions(self.job).get(self.name, "")

    @property
    def flag(self) -> str:
        """The option's flag: `--rl-num-generations`."""
        return "--" + self.name.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """What follows the flag in its help: `INTEGER`, `KEY=VALUE`, `colocate|server`."""
        return "KEY=VALUE" if self.name in TABLES else "|".join(self.choices) or self.type_name.upper()

    @property
    def values(self) -> str:
        """What may follow the flag: `integer, at least 2`, `colocate, server`."""
        return ", ".join(self.choices) or self.type_name + self.bounds

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value, and a `--no-` form."""
        return self.type_name == "switch"

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
    return tuple(_option(name, job, titles[name]) for name in option_names(job))


def _option(name: str, job: type[Options], section: str) -> Option:
    field = job.model_fields[name]
    annotation, metadata = _without_none(field.annotation, field.metadata)
    choices = tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()
    return Option(
        name=name,
        job=job,
        section=section,
        default=field.default,
        type_name="" if choices else next((text for kind, text in _TYPE_NAMES.items() if annotation == kind), _JSON),
        bounds="".join(_bounds(metadata)),
        choices=choices,
        resume_safe=RESUME_SAFE in field.metadata,
    )


_JSON = "JSON object"
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


def _without_none(annotation: object, metadata: Iterable[object]) -> tuple[object, list[object]]:
    """`X` of `X | None`, with the metadata of both, as an unset option needs no mention."""
    found = list(metadata)
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        found += more
    return annotation, found


def _bounds(metadata: Iterable[object]) -> Iterator[str]:
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            yield from _bounds(bound.metadata)
        elif isinstance(bound, Interval):
            yield from _bounds(bound)
        for kind, name, text in _BOUNDS:
            if isinstance(bound, kind):
                yield f", {text} {getattr(bound, name)}"
