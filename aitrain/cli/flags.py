"""Flags: those that several commands have, those made of the options of a job, and the help that shows them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

    from aitrain.options.section import Option, Options

COMMON = {
    "model", "rl_env", "peft", "lr", "rl_prompts_per_step", "rl_num_generations", "rl_max_new_tokens", "max_steps",
    "use_vllm", "project_name", "decoding", "concurrency", "model_name", "rl_temperature", "eval_cases", "eval_samples",
    "rl_preset",
}  # fmt: skip
"""The most used options of jobs: the others are shown by `aitrain options` only."""
SHORT = {"eval_cases": ["--eval-cases", "--cases"], "eval_samples": ["--eval-samples", "--samples"]}
"""Flags with a second name."""
FEW = 12
"""Number of options of a job up to which the help shows all of them."""


def run_names() -> list[str]:
    """Names of the runs in runs/, for completion."""
    from aitrain.runs.run_folder import RUNS  # here, because help does not need it

    return sorted(status.parent.name for status in Path(RUNS).glob("*/status.json"))


def run_argument(metavar: str, text: str) -> Any:
    """An argument for names of runs, which the shell completes, with its help."""
    return typer.Argument(metavar=metavar, autocompletion=run_names, help=text)


RunName = Annotated[str, run_argument("RUN", "A run folder, or the name of a run in runs/.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with options; flags override it.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and show the plan; train nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; a training: its events, one a line.")]


def print_json(value: object) -> None:
    """Print a value for programs, in ASCII, so that it contains no control characters."""
    typer.echo(json.dumps(value, indent=2))


def group(sentence: str) -> typer.Typer:
    """A command that has commands."""
    return typer.Typer(help=sentence, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


# -- the options of a job


def with_options(job: type[Options], names: Collection[str] | None = None) -> Callable[..., Callable[..., int]]:
    """Replace the `**flags` of a command by one parameter for each option of a job, so that Typer makes its flags; with
    `names`, only for these. The command gets those that are given. Values are as they were typed: the job's class
    parses and checks them."""
    from aitrain.options.section import options_of

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter(option) for option in options_of(job) if names is None or option.name in names]

        @wraps(command)
        def call(**values: object) -> int:
            return command(**{name: value for name, value in values.items() if value not in (None, [])})

        vars(call)["__signature__"] = inspect.Signature([*own, *made])
        return call

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    """The option as Typer takes it, which names its flags itself, with the `--no-` form of a switch."""
    from aitrain.options.value_types import REPEATED

    info = typer.Option(
        *SHORT.get(option.name, ()),
        help=f"{option.description} [{option.shown_default}]",
        metavar=option.placeholder,
        rich_help_panel=option.section,
        autocompletion=lambda: option.choices,
    )
    # no `str`: for each option of one Typer makes a function that checks it, also where it is not given
    kind = bool if option.is_switch else list[object] if option.name in REPEATED else object
    annotation: Any = Annotated[kind | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class JobCommand(TyperCommand):
    """A command whose help shows, of a job with many options, those that are used most; in brackets are defaults."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write arguments and options. The shell completes the hidden ones, too: they are hidden here only."""
        of_job: list[Any] = [one for one in self.get_params(ctx) if getattr(one, "rich_help_panel", None)]
        has_many = len(of_job) > FEW
        for one in of_job:
            one.hidden = has_many and one.name not in COMMON
        super().format_options(ctx, formatter)
        if has_many:
            formatter.write("\nAll options: aitrain options. Options about something: aitrain options WORD\n")
