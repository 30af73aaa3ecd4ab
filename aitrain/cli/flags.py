"""Flags of a command, made from the options of a job."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

import typer

from aitrain.cli.completion import VARIABLE
from aitrain.options.option import Option, options_of
from aitrain.options.section import Options
from aitrain.options.value_types import REPEATED, TABLES

BASH = "complete_bash"
Command = Callable[..., int]
Flag = str | bool | list[str] | None
"""A flag's value from Typer; None if it is not given."""


def given_flags(flags: Mapping[str, Flag], **more: Flag) -> dict[str, Flag]:
    """The options given on the command line; those of `more` come from flags of other names, and the flags win."""
    given = {name: value for values in (more, flags) for name, value in values.items() if value not in (None, [])}
    return {name: _only(name, value) for name, value in given.items()}


def _only(name: str, value: Flag) -> Flag:
    """The value of a flag that may be repeated and was not; tables are lists of texts in any case."""
    return value[0] if isinstance(value, list) and len(value) == 1 and name not in TABLES else value


def with_options(job: type[Options], names: Collection[str] | None = None) -> Callable[[Command], Command]:
    """Replace the `**flags` of a command by one parameter for each option of a job, so that Typer makes its flags; with
    `names`, only for these."""

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [option for option in options_of(job) if names is None or option.name in names]
        parameters = [*own, *map(_parameter, options)]
        keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
        vars(command)["__signature__"] = inspect.Signature(keywords)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    """The parameter of an option. Values are text, as the job's class parses and checks them. The help text is for
    shells that show it beside completions; commands have their own help pages."""
    flags = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    description = option.description if os.environ.get(VARIABLE, BASH) != BASH else None
    info = typer.Option(flags, help=description, autocompletion=lambda: list(option.choices))
    kind: object = bool | None if option.is_switch else list[str] | None if option.name in REPEATED else str | None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )
