"""`aitrain`: the commands, and how what goes wrong is told."""

from __future__ import annotations

import os
import sys
import traceback

import typer

import aitrain
from aitrain.cli.data import data
from aitrain.cli.demo import demo
from aitrain.cli.doctor import doctor
from aitrain.cli.grpo import grpo, grpo_signature
from aitrain.cli.plan import plan
from aitrain.cli.runs import runs
from aitrain.cli.show import show
from aitrain.cli.view import view
from aitrain.errors import AitrainError, did_you_mean
from aitrain.knobs import elsewhere
from aitrain.privacy import masked
from aitrain.report.visible import visible

SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}

app = typer.Typer(
    help="Fine-tune a language model with GRPO on a task of your own.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=SETTINGS,
    pretty_exceptions_enable=False,
)
app.command(add_help_option=False)(grpo_signature(grpo))
app.command()(demo)
app.command(add_help_option=False)(grpo_signature(plan))
app.command()(runs)
app.command()(show)
app.command()(doctor)
app.command()(view)
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aitrain {aitrain.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Say which version."),
) -> None:
    """Fine-tune a language model with GRPO on a task of your own."""


def main() -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 wrong command, 3 environment failed, 130 interrupted."""
    sys.exit(_run())


def _run() -> int:
    try:
        return int(app(standalone_mode=False, prog_name="aitrain") or 0)
    except AitrainError as error:
        return _tell(str(error), error.exit_code, error)
    except typer.TyperException as error:
        return _tell(_usage(error), 2, error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # `aitrain grpo --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _usage(error: typer.TyperException) -> str:
    """What the parser refused, with what AITraining's flags are called here; the help where a command is missing."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    flag = getattr(error, "option_name", None) or ""
    if hint := elsewhere(flag):
        return f"{error.message}\n{hint}"
    near = did_you_mean(flag, getattr(error, "possibilities", None) or ())
    context = getattr(error, "ctx", None)
    see = f"\nSee {context.command_path} --help" if context else ""
    return (f"{error.message}.{near}" if near else error.format_message()) + see


def _tell(message: str, code: int, error: BaseException) -> int:
    message = masked(message)
    print(message if message.startswith("Usage:") else f"aitrain: {visible(message)}", file=sys.stderr)
    if "--debug" in sys.argv:
        print(masked("".join(traceback.format_exception(error))), file=sys.stderr)
    return code
