"""Shell completion with Typer's scripts, without Typer's import of Rich for each description."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from typer._click.shell_completion import CompletionItem, add_completion_class
from typer._completion_classes import BashComplete, FishComplete, ZshComplete
from typer._completion_shared import _get_shell_name, get_completion_script
from typer._completion_shared import install as write_script

from aitrain.errors import ConfigError

PROGRAM = "aitrain"
VARIABLE = "_AITRAIN_COMPLETE"
"""Environment variable by which a shell's script requests completions."""
SHELLS = ("bash", "zsh", "fish")


class Bash(BashComplete):
    """Bash splits `--option=value` into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, without such an `=`, and the incomplete word at the cursor."""
        words, incomplete = super().get_completion_args()
        is_value = words[-1:] == ["="] and words[-2:-1] != [] and words[-2].startswith("--")
        return (words[:-1] if is_value else words), incomplete


class Zsh(ZshComplete):
    """Shows descriptions unchanged: Typer's class would read square brackets as markup."""

    def format_completion(self, item: CompletionItem) -> str:
        """`"--lr":"Learning rate"`."""
        value = super().format_completion(CompletionItem(item.value))
        return f"{value}:{super().format_completion(CompletionItem(item.help))}" if item.help else value


class Fish(FishComplete):
    """Shows descriptions unchanged, for the same reason."""

    def format_completion(self, item: CompletionItem) -> str:
        """The word and its description, with a tab between."""
        return f"{item.value}\t{' '.join(item.help.split())}" if item.help else str(item.value)


def register() -> None:
    """Register the shells with Typer, which prints completions instead of running a command if VARIABLE is set."""
    for kind in (Bash, Zsh, Fish):
        add_completion_class(kind, kind.name)


def show(ctx: typer.Context, wanted: bool) -> None:
    """Print the completion script for the user's shell.

    Raises:
        ConfigError: the shell is none of SHELLS.
    """
    if wanted and not ctx.resilient_parsing:
        typer.echo(script(_shell()))
        raise typer.Exit()


def script(shell: str) -> str:
    """The completion script of a shell, which the shell reads at its start."""
    return get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)


def install(ctx: typer.Context, wanted: bool) -> None:
    """Install the completion script for the user's shell.

    Raises:
        ConfigError: the shell is none of SHELLS, or its files cannot be written.
    """
    if wanted and not ctx.resilient_parsing:
        try:
            shell, path = write_script(_shell(), PROGRAM, VARIABLE)
        except OSError as error:
            raise ConfigError(f"--install-completion: cannot write {error.filename}: {error.strerror}") from None
        typer.echo(f"Completion for {shell} is in {path}. It works in a new terminal.")
        raise typer.Exit()


def _shell() -> str:
    """The shell that runs the command; if unknown, as in a container, the user's login shell."""
    shell = _get_shell_name() or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise ConfigError(f"completion: {shell or 'this shell'} is not supported\nRun it from {', '.join(SHELLS)}.")
    return shell


def run_names() -> list[str]:
    """Names of the runs in runs/, for completion."""
    from aitrain.runs.run_folder import RUNS

    return sorted(status.parent.name for status in Path(RUNS).glob("*/status.json"))
