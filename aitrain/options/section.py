"""`Options`, the base class of option sections and of the jobs composed of them."""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from aitrain.errors import ConfigError
from aitrain.options.docstrings import field_docstrings
from aitrain.options.value_types import normalize

T = TypeVar("T")
RESUME_SAFE = "resume_safe"
ResumeSafe = Annotated[T, RESUME_SAFE]
"""Type of an option that a resumed run may change: it does not change the training, or is compared in another way."""

Rule = tuple[bool, str]
"""Whether a rule is broken, and the error message."""


class Options(BaseModel):
    """A section of options, or a job: a class that inherits from the sections that it needs.

    A section sets `section`, its title, and has one annotated field with a docstring for each option. Unknown names and
    invalid values raise ConfigError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)

    section: ClassVar[str]
    """Title of the section, in the help and the docs."""
    file_flag: ClassVar[str] = "--config: "
    """Beginning of a message about a file of options."""
    file_hint: ClassVar[str] = ""
    """End of the message about a file that cannot be read."""
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Alternatives to an option: its flag also overrides them in the file."""

    if not TYPE_CHECKING:  # type checkers see pydantic's own signature, with every option in it

        def __init__(self, **values: object) -> None:
            from aitrain.options.in_python import in_python  # here, because only errors need it

            try:
                self._validate(values)
            except ConfigError as error:
                raise ConfigError(in_python(str(error), type(self).model_fields)) from None

    def _validate(self, values: Mapping[str, object]) -> None:
        build(type(self))
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_message(error, type(self))) from None

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """The options of a command or a file: errors name flags, where those of the constructor name arguments.

        Raises:
            ConfigError: a name or a value is wrong.
        """
        options = cls.__new__(cls)
        options._validate(values)
        return options

    @field_validator("*", mode="before")
    @classmethod
    def _normalize(cls, value: object, info: ValidationInfo) -> object:
        return normalize(value, cls.model_fields[str(info.field_name)].annotation)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for owner in reversed(type(self).__mro__):  # sections before the jobs made of them
            if issubclass(owner, Options) and "rules" in vars(owner):
                for is_broken, message in owner.rules(self):
                    if is_broken:
                        raise ValueError(message)
        return self

    def rules(self) -> Iterable[Rule]:
        """Rules about several options of this class, evaluated up to the first broken one."""
        return ()

    def written(self) -> dict[str, object]:
        """The values in the form that a YAML file holds, in the order of the docs."""
        values = self.model_dump()
        return {name: values[name] for name in option_names(type(self))}

    def changed(self) -> dict[str, object]:
        """Those of `written` that differ from their defaults."""
        fields = type(self).model_fields  # once, as pydantic makes it of all classes each time
        return {name: value for name, value in self.written().items() if value != fields[name].default}

    def changed_flags(self, *names: str) -> list[str]:
        """Those of the named options that differ from their defaults, as flags with values."""
        changed = self.changed()
        return [f"--{name.replace('_', '-')} {changed[name]}" for name in names if name in changed]


@cache
def sections_of(job: type[Options]) -> tuple[type[Options], ...]:
    """The sections that a job inherits from, in the order in which it names them."""
    return tuple(owner for owner in job.__mro__ if issubclass(owner, Options) and "section" in vars(owner))


@cache
def option_names(job: type[Options]) -> tuple[str, ...]:
    """The names of a job's options, section by section."""
    own = [vars(section).get("__annotations__", {}) for section in sections_of(job)]
    return tuple(name for annotations in own for name in annotations if name in job.model_fields)


@cache
def descriptions(job: type[Options]) -> dict[str, str]:
    """The docstring of each option."""
    return {name: text for section in sections_of(job) for name, text in field_docstrings(section).items()}


def _message(error: ValidationError, job: type[Options]) -> str:
    """The first error, as a message."""
    from aitrain.options.invalid_values import invalid_value  # here, because only errors need them
    from aitrain.options.other_names import unknown_option

    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return unknown_option(name, job.model_fields)
    if not name:  # a rule about several options
        return str(first["ctx"]["error"])
    return f"{name}: {invalid_value(first)}\n{descriptions(job).get(name, '')}".rstrip()


NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def build(job: type[Options]) -> None:
    """Build pydantic's validator of a job, once, without pydantic's plugins: looking for them reads the metadata of
    every installed package, a fifth of the cost of `aitrain plan`."""
    if job.__pydantic_complete__:
        return
    before = os.environ.get(NO_PLUGINS)
    os.environ[NO_PLUGINS] = "__all__"
    try:
        job.model_rebuild()
    finally:
        del os.environ[NO_PLUGINS]
        if before is not None:
            os.environ[NO_PLUGINS] = before
