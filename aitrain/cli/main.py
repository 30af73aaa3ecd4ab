"""`aitrain`: its commands, which are imported when they are called, and how errors are shown."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

import aitrain
from aitrain.cli.flags import JobCommand
from aitrain.errors import AitrainError, WorseError, write_error_file

if TYPE_CHECKING:
    from typer._click import Command, Context

COMMANDS = {
    "grpo": "Train a model with GRPO on your environment.",
    "demo": "Teach the tiny model to add, in about a minute on two CPU cores.",
    "recipe": "Settings for known tasks: list, show, run.",
    "eval": "Score models on the held-out cases of an environment.",
    "sweep": "Search the options of a run, one trial after another.",
    "plan": "Show what a run would do, and what it needs.",
    "show": "Show a run in the terminal: scores, curve, rollouts; or list runs.",
    "reproduce": "Train a run again from its folder, and compare: the same bits?",
    "chat": "Talk to a trained model and its base.",
    "compare": "Compare models on the same cases: better, worse, and on which.",
    "doctor": "Check whether this machine can train: libraries, GPUs, disk.",
    "view": "Show runs as a page in the browser, on 127.0.0.1 only.",
    "export": "Export a trained model as one folder, an adapter merged into its base.",
    "serve": "Serve a trained model with vLLM, an adapter beside its base.",
    "options": "Search the options of a training by words.",
    "mcp": "Serve these commands as tools to a coding agent (MCP).",
    "env": "Write, check, play and inspect environments.",
}
"""The commands with their short help; command `x` is the function or Typer app `x` of `aitrain.cli.x`."""
MODULES = {
    **dict.fromkeys(("grpo", "demo", "recipe", "reproduce"), "train"),
    **dict.fromkeys(("chat", "export", "serve"), "models"),
    **dict.fromkeys(("show", "view", "compare"), "runs"),
}
"""Modules of commands that are not in one of their own name."""
LAUNCHED = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables of processes that torchrun, accelerate launch, srun or mpirun started."""


class CommandGroup(TyperGroup):
    """The commands by name and short help only, so that help starts at once."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """The called command, imported."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and load_command(str(name)), rest


def load_command(name: str) -> Command:
    """The command as Typer parses it, with all its options."""
    command = getattr(import_module(f"aitrain.cli.{MODULES.get(name, name)}"), name)
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(add_completion=False, rich_markup_mode=None)
        command.command(name, cls=JobCommand)(function)
    return typer.main.get_command(command)


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "color": False if os.environ.get("NO_COLOR") else None,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    pretty_exceptions_enable=False,
)
for _name, _sentence in COMMANDS.items():
    app.command(_name, short_help=_sentence)(lambda: None)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Fine-tune a language model with GRPO on a task of your own. --debug shows the traceback of an error, with any
    command."""
    if version:
        typer.echo(f"aitrain {aitrain.__version__}")


def main() -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 wrong command, 3 environment failed, 4 worse or not the same
    (compare --fail-if-worse, reproduce), 130 interrupted."""
    try:
        code = _run()
    except KeyboardInterrupt:  # while an error was shown
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C must not change the exit code
    sys.exit(code)


def _run() -> int:
    try:
        if any(name in os.environ for name in LAUNCHED):
            from aitrain.launch.launched_ranks import start_rank  # here, because no other process needs it

            start_rank(sys.argv[1:])
        words = [word for word in sys.argv[1:] if word != "--debug"]
        return int(app(words, standalone_mode=False, prog_name="aitrain") or 0)
    except AitrainError as error:
        write_error_file(error)
        return _print_error(str(error), error.exit_code, error)
    except typer.TyperException as error:
        return _print_error(_usage(error), 2, error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # `aitrain grpo --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as of another user's run folder, of a file to write, or of a port that is taken
        place = f"{error.filename}: " if error.filename else ""
        advice = "\nChoose another one with --port." if error.errno == errno.EADDRINUSE else ""
        return _print_error(f"{place}{error.strerror or error}{advice}", 2, error)


def _usage(error: typer.TyperException) -> str:
    """Message for a command line that the parser refused; the help if the command is missing."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    context = getattr(error, "ctx", None)
    said = error.format_message().replace("Value error, ", "")  # pydantic's words before those of typer
    if context and type(error).__name__ == "NoSuchOption":
        from aitrain.options.other_names import unknown_option  # here, because only this message needs it

        known = [parameter.name for parameter in context.command.params]
        said = unknown_option(getattr(error, "option_name", ""), known)
    return said + (f"\nSee {context.command_path} --help" if context else "")


def _print_error(message: str, code: int, error: BaseException) -> int:
    from aitrain.redaction import redact
    from aitrain.ui.output import show_error

    as_json = "--json" in sys.argv and code != WorseError.exit_code  # after compare's own JSON
    show_error(message, code, as_json)
    if "--debug" in sys.argv:
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
    return code
