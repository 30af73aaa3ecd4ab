"""A group of commands that are imported when they are called, so that help and short commands start at once."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from aitrain.ui.loading import loading

if TYPE_CHECKING:
    from typer._click import Command, Context


OTHER_COMMANDS = {
    "llm": "aitrain grpo",
    "train": "aitrain grpo",
    "rl": "aitrain grpo",
    "merge": "aitrain export",
    "merge-llm-adapter": "aitrain export",
    "infer": "aitrain chat",
    "evaluate": "aitrain eval",
    "api": "aitrain serve",
}
"""Commands of other tools, and what they are here."""


SLOW = {"grpo", "demo", "recipe", "eval", "sweep", "plan", "env_check"}
"""Commands that say that they are loading; the others have something to show at once."""
SILENT = {"-q", "--quiet", "-h", "--help", "--help-all"}
"""Flags with which nothing stands on the terminal while a command is loaded."""


class LazyGroup(TyperGroup):
    """Imports a command's module and builds its options when the command is called or completed, not before.

    Command `x` is the function or Typer app `x` of `aitrain.cli.x`, with the prefix in front of both names.
    """

    prefix = ""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Replace the placeholder, which has only a name and a short help, by the command."""
        if args and (command := OTHER_COMMANDS.get(args[0])) and args[0] not in self.commands:
            ctx.fail(f"No such command '{args[0]}'. Here it is {command}.")
        name, placeholder, rest = super().resolve_command(ctx, args)
        module = self.prefix + str(name)
        with _loading(ctx) if module in SLOW else nullcontext():
            return name, placeholder and load_command(module), rest

    def get_help_option(self, ctx: Context) -> TyperOption | None:
        """The help option with a default, without which Typer would load pydantic to convert None."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def load_command(name: str) -> Command:
    """The command as Typer parses it, with all its options."""
    gc.disable()  # these objects are permanent; collections would take a fifth of a short command's time
    try:
        command = getattr(import_module(f"aitrain.cli.{name}"), name)
        if not isinstance(command, typer.Typer):
            function, command = command, typer.Typer(add_completion=False, rich_markup_mode=None)
            command.command(name)(function)
        built = typer.main.get_command(command)
    finally:
        gc.freeze()
        gc.enable()
    for parameter in built.params:
        if isinstance(parameter, TyperOption):
            parameter.__class__ = LazyOption
    for one in built.commands.values() if isinstance(built, TyperGroup) else [built]:
        if isinstance(one, TyperCommand) and name in SLOW:
            one.__class__ = LazyCommand
    return built


class LazyCommand(TyperCommand):
    """A slow command, which says that it is loading while its options are converted, for which Typer loads pydantic."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the command's words."""
        with _loading(ctx):
            return super().parse_args(ctx, args)


def _loading(ctx: Context) -> AbstractContextManager[None]:
    """What stands on the terminal until the command says more, unless it is quiet, helps, or completes a line."""
    return loading("loading aitrain", quiet=ctx.resilient_parsing or not SILENT.isdisjoint(sys.argv))


class LazyOption(TyperOption):
    """An option whose value is converted only if it is given, as Typer builds a pydantic converter for it."""

    def process_value(self, ctx: Context, value: object) -> object:
        """Convert the value, if there is one, and call the callback."""
        is_absent = value is None and not (self.required or self.multiple or self.callback)
        return None if is_absent else super().process_value(ctx, value)
