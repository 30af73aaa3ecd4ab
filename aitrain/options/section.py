"""`Options`, the base class of option sections and of the jobs composed of them, and each option as flags, help and
docs need it.
"""

from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from aitrain.errors import ConfigError
from aitrain.options.value_types import TABLES, leaves, normalize, shown

T = TypeVar("T")
RESUME_SAFE = "resume_safe"
ResumeSafe = Annotated[T, RESUME_SAFE]
"""Type of an option that a resumed run may change: it does not change the training, or is compared in another way."""


class Options(BaseModel):
    """A section of options, or a job: a class that inherits from the sections that it needs.

    A section sets `section`, its title, and has one annotated field with a docstring for each option. A method `rules`
    yields the rules about several options that are broken; the first one is the error. Unknown names and invalid values
    raise ConfigError. Messages name options as here, which flags, files and Python take alike.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True, use_attribute_docstrings=True, str_min_length=1
    )

    section: ClassVar[str]
    """Title of the section, in the help and the docs."""
    resume_safe: ClassVar[bool] = False
    """Whether a resumed run may change all options of the section, as if their types were ResumeSafe."""

    if not TYPE_CHECKING:  # type checkers see pydantic's own signature, with every option in it

        def __init__(self, /, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_message(error, type(self))) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        for field in cls.model_fields.values():  # as one line, for messages and tables
            field.description = " ".join((field.description or "").split())

    @field_validator("*", mode="before")
    @classmethod
    def _normalize(cls, value: object, info: ValidationInfo) -> object:
        return normalize(value, cls.model_fields[str(info.field_name)].annotation)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for owner in reversed(type(self).__mro__):  # sections before the jobs made of them
            if "rules" in vars(owner):
                for message in vars(owner)["rules"](self):
                    raise ValueError(message)
        return self

    def written(self) -> dict[str, object]:
        """The values in the form that a YAML file holds, in the order of the docs."""
        return self.model_dump()

    def changed(self) -> dict[str, object]:
        """Those of `written` that differ from their defaults."""
        fields = type(self).model_fields  # once, as pydantic makes it of all classes each time
        return {name: value for name, value in self.written().items() if value != fields[name].default}


@cache
def sections_of(job: type[Options]) -> tuple[type[Options], ...]:
    """The sections that a job inherits from, in the order of its fields: the last base is the first one."""
    return tuple(owner for owner in reversed(job.__mro__) if issubclass(owner, Options) and "section" in vars(owner))


def _message(error: ValidationError, job: type[Options]) -> str:
    """The first error, as a message."""
    from aitrain.options.other_names import unknown_option  # here, because only errors need it

    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return unknown_option(name, job.model_fields)
    if first["type"] == "value_error":  # of a validator, or a rule about several options
        text = str(first["ctx"]["error"])
    else:
        rule = first["msg"].partition(", unable")[0].partition(" should ")[2]  # `Input should be a valid number`
        text = f"must {rule or 'be smaller'}, not {shown(first['input'])}"  # no rule: an integer of 5,000 digits
    return f"{name}: {text}\n{job.model_fields[name].description}" if name else text


# -- options, one by one

_TYPE_NAMES = {bool: "switch", dict[str, object]: "JSON object", float: "number", int: "integer", str: "text"}


class Option:
    """One option of a job."""

    def __init__(self, section: type[Options], name: str, field: FieldInfo) -> None:
        parts = leaves(field.annotation)
        self.name, self.section, self.default, self.description = (
            name,
            section.section,
            field.default,
            field.description,
        )
        self.choices = [part for part in parts if isinstance(part, str)]
        """The values that it may have; empty where it is not a choice."""
        self.type_name = "text" if self.choices else next(text for kind, text in _TYPE_NAMES.items() if kind in parts)
        """switch, integer, number, text or JSON object."""
        self.resume_safe = section.resume_safe or RESUME_SAFE in field.metadata
        """Whether a resumed run may have another value."""

    @property
    def flag(self) -> str:
        """`--rl-num-generations`."""
        return "--" + self.name.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """What follows the flag in its help: `INTEGER`, `KEY=VALUE`, `colocate|server`; nothing after a switch."""
        if self.name in TABLES:
            return "KEY=VALUE"
        return "" if self.is_switch else "|".join(self.choices) or self.type_name.upper()

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
    return tuple(
        Option(section, name, field) for section in sections_of(job) for name, field in section.model_fields.items()
    )
