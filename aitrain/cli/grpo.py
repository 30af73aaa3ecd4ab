"""`aitrain grpo`: train a model on an environment. Its flags are the options."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aitrain.cli.loudness import Wanted
from aitrain.options.documentation import help_text
from aitrain.options.option import Option, options_of
from aitrain.options.reading import resolve

if TYPE_CHECKING:
    from aitrain.launch.preflight import RunPlan


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    """Typer's own help knows no sections, and with Rich it cuts our longer flags off."""
    if wanted and not ctx.resilient_parsing:
        typer.echo(HELP + as_help(min(100, shutil.get_terminal_size().columns)))
        raise typer.Exit()


HELP = """\
Usage: aitrain grpo [OPTIONS]

  Train a model with GRPO on your environment:

    aitrain grpo --model tiny --rl-env path/to/file.py:Class

Command:
  --config FILE
        YAML file with options; flags win over it.
  --resume
        Go on from the newest whole checkpoint of this run; short for --resume-from-checkpoint auto.
  --dry-run
        Check everything and show the plan; start nothing.
  -q, --quiet
        Show errors and the last line only.
  -v, --verbose
        Show what the libraries and the environment print as well, as it comes.
  --debug
        Show tracebacks, and at the end all that was printed.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""


def grpo_signature(command: Callable[..., int]) -> Callable[..., int]:
    """Give the command one parameter for each option, so that Typer makes flags of them, and the short one to resume."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = [_parameter(option) for option in options() if option.name != "trl"] + [_RESUME]
    signature = inspect.Signature([parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in [*own, *made]])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return command


def _parameter(option: Option) -> inspect.Parameter:
    """Values stay text here: config.py judges them, whether they come from a flag, a file or Python."""
    flags = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    option = typer.Option(flags, help=option.sentence, autocompletion=lambda: list(option.choices))
    kind = bool | None if option.is_switch else str | None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_RESUME = inspect.Parameter(
    "resume",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--resume")],
)


@grpo_signature
def grpo(
    config: Annotated[Path | None, typer.Option("--config")] = None,
    trl: Annotated[list[str] | None, typer.Option("--trl")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Any,
) -> int:
    """Train a model with GRPO on your environment."""
    from aitrain.launch.preflight import check  # here, because help needs none of it

    wanted = Wanted(quiet, verbose, debug)
    plan = check(resolve(config, given_options(flags), trl or []))
    if dry_run:
        for line in (*plan_lines(plan), *plan.notes):
            typer.echo(line)
        return 0
    from aitrain.cli.running import start  # here, because a refused command needs none of it

    return start(plan, wanted)


def given_options(flags: dict[str, Any]) -> dict[str, Any]:
    """The options that were given on the command line, the short way to resume spelt out."""
    given = {name: value for name, value in flags.items() if value is not None}
    if given.pop("resume", False):
        given.setdefault("resume_from_checkpoint", "auto")
    return given


def plan_lines(plan: RunPlan) -> list[str]:
    """What would be started."""
    config, folder = plan.config, plan.folder
    updates = config.trl.get("num_iterations", 1)
    repeated = f" x {updates} updates with each batch" if updates > 1 else ""
    steps = (
        f"{config.max_steps}"
        if config.max_steps
        else f"{config.epochs} x training cases / {plan.batch.prompts_per_step}{repeated}, rounded up"
    )
    where = folder.path if folder else Path(config.output_dir) / config.project_name
    lines = {
        "model": config.model,
        "environment": str(plan.source.file or plan.source.module) if plan.source else "from Python",
        "batch": str(plan.batch),
        "loss": str(config.loss),
        "steps": steps,
        "processes": f"{plan.batch.processes} on {'GPU ' + ', '.join(plan.gpus) if plan.gpus else 'CPU'}",
        "run folder": str(where),
        **({"resumes from": str(plan.checkpoint)} if plan.checkpoint else {}),
    }
    return [f"{name:12} {value}" for name, value in lines.items()]
