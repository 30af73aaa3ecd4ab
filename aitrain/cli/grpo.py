"""`aitrain grpo`: train a model on an environment. Its flags are the knobs."""

from __future__ import annotations

import inspect
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Ended, Failed, Note
from aitrain.knobs import Knob, as_help, knobs, resolve
from aitrain.launch.preflight import Plan, check
from aitrain.launch.processes import Processes
from aitrain.report.terminal import Screen, show_result
from aitrain.run_folder import Result, RunFolder, read_lines


def _show_help(wanted: bool) -> None:
    """Typer's own help knows no sections, and with Rich it cuts our longer flags off."""
    if wanted:
        typer.echo(HELP + as_help(min(100, shutil.get_terminal_size().columns)))
        raise typer.Exit()


HELP = """\
Usage: aitrain grpo [OPTIONS]

  Train a model with GRPO on your environment:

    aitrain grpo --model tiny --rl-env path/to/file.py:Class

Command:
  --config FILE
        YAML file with knobs; flags win over it.
  --resume
        Go on from the newest whole checkpoint of this run; short for --resume-from-checkpoint auto.
  --dry-run
        Check everything and show the plan; start nothing.
  --debug
        Show tracebacks and the libraries' output.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""


def grpo(
    config: Annotated[Path | None, typer.Option("--config")] = None,
    trl: Annotated[list[str] | None, typer.Option("--trl")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Any,
) -> int:
    """Train a model with GRPO on your environment."""
    given = {name: value for name, value in flags.items() if value is not None}
    if given.pop("resume", False):
        given.setdefault("resume_from_checkpoint", "auto")
    plan = check(resolve(config, given, trl or []))
    if dry_run:
        show_plan(plan)
        return 0
    return start(plan, debug)


def grpo_signature(command: Callable[..., int]) -> Callable[..., int]:
    """Give the command one parameter for each knob, so that Typer makes flags of them, and the short one to resume."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = [_parameter(knob) for knob in knobs() if knob.name != "trl"] + [_RESUME]
    signature = inspect.Signature([parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in [*own, *made]])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return command


def _parameter(knob: Knob) -> inspect.Parameter:
    """Values stay text here: config.py judges them, whether they come from a flag, a file or Python."""
    option = typer.Option(f"{knob.flag}/--no-{knob.flag[2:]}" if knob.is_switch else knob.flag)
    kind = bool | None if knob.is_switch else str | None
    return inspect.Parameter(
        knob.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_RESUME = inspect.Parameter(
    "resume",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--resume")],
)


def show_plan(plan: Plan) -> None:
    """What would be started."""
    config, folder = plan.config, plan.folder
    steps = (
        f"{config.max_steps}"
        if config.max_steps
        else f"{config.epochs} x (training cases / {plan.batch.prompts_per_step})"
    )
    where = folder.path if folder else Path(config.output_dir) / config.project_name
    lines = {
        "model": config.model,
        "environment": str(plan.source.file or plan.source.module) if plan.source else "from Python",
        "batch": str(plan.batch),
        "steps": steps,
        "processes": f"{plan.batch.processes} on {'GPU ' + ', '.join(plan.gpus) if plan.gpus else 'CPU'}",
        "run folder": str(where),
        **({"resumes from": str(plan.checkpoint)} if plan.checkpoint else {}),
    }
    for name, value in lines.items():
        print(f"{name:12} {value}")
    for note in plan.notes:
        print(note)


def start(plan: Plan, debug: bool = False) -> int:
    """Run the plan and show what came of it; returns the exit code.

    Raises:
        AitrainError: the run failed; what it left behind is said, and nothing is left of a run that never began.
    """
    screen = Screen()
    folder = plan.open_folder()
    for note in plan.notes:
        screen(Note(note))
    from aitrain.report.writing import Reporting  # here, because help needs none of it

    report = Reporting(folder)
    try:
        end = Processes(plan, folder, report.during(screen)).run()
    except BaseException as error:
        folder.write_status("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    if debug and folder.log.exists():
        print(folder.log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    if isinstance(end, Failed):
        failure = _failure(end, folder, resumed=plan.folder is not None)
        if folder.path.exists():
            report.finish(screen)
        raise failure
    report.finish(screen)
    show_result(Result.read(folder.path), Console(highlight=False))
    return _say_how_to_resume(end, folder)


def _failure(end: Failed, folder: RunFolder, resumed: bool) -> AitrainError:
    """The error to show; a run that was refused before its first step leaves no folder."""
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    began = resumed or folder.result.exists() or any(True for _ in read_lines(folder.metrics))
    if not began and end.exit_code != RunFailed.exit_code:
        folder.discard()
        return error
    folder.write_status("stopped" if end.exit_code == Interrupted.exit_code else "failed")
    if str(folder.log) not in end.message:
        error.args = (f"{end.message}\nrun folder: {folder.path} (train.log has the details)",)
    return error


def _say_how_to_resume(end: Ended, folder: RunFolder) -> int:
    if end.status != "stopped":
        return 0
    command = f"aitrain grpo --config {shlex.quote(str(folder.config))} --resume"
    why = f": {end.because}" if end.because else ""
    print(f"stopped after step {end.step} and saved{why}; go on with:\n  {command}", file=sys.stderr)
    return 0 if end.because else 130
