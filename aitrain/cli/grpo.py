"""`aitrain grpo`: train a model on an environment. Its flags are the knobs."""

from __future__ import annotations

import inspect
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from aitrain.checkpoint import checkpoints_of, step_of
from aitrain.errors import AitrainError, ConfigError, Interrupted, RunFailed
from aitrain.events import Announce, Ended, Failed, Note
from aitrain.knobs import Knob, as_help, knobs, resolve
from aitrain.launch.preflight import Plan, check
from aitrain.report.log_tail import LogTail
from aitrain.report.terminal import Screen, last_line, show_result
from aitrain.report.visible import visible
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
  -q, --quiet
        Show errors and the last line only.
  -v, --verbose
        Show what the libraries and the environment print as well, as it comes.
  --debug
        Show tracebacks, and at the end all that was printed.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""


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
    wanted = Wanted(quiet, verbose, debug)
    plan = check(resolve(config, given_knobs(flags), trl or []))
    if dry_run:
        for line in (*plan_lines(plan), *plan.notes):
            typer.echo(line)
        return 0
    return start(plan, wanted)


def given_knobs(flags: dict[str, Any]) -> dict[str, Any]:
    """The knobs that were given on the command line, the short way to resume spelt out."""
    given = {name: value for name, value in flags.items() if value is not None}
    if given.pop("resume", False):
        given.setdefault("resume_from_checkpoint", "auto")
    return given


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


def plan_lines(plan: Plan) -> list[str]:
    """What would be started."""
    config, folder = plan.config, plan.folder
    steps = (
        f"{config.max_steps}"
        if config.max_steps
        else f"{config.epochs} x training cases / {plan.batch.prompts_per_step}, rounded up"
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


@dataclass(frozen=True)
class Wanted:
    """How much of a run its command shows. Quiet and verbose at the same time raise ConfigError."""

    quiet: bool = False
    verbose: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose: give one of them")


def start(plan: Plan, wanted: Wanted) -> int:
    """Run the plan and show what came of it; returns the exit code.

    Raises:
        AitrainError: the run failed; what it left behind is said, and nothing is left of a run that never began.
    """
    from aitrain.report.summary import scores
    from aitrain.report.writing import Reporting  # here, because help needs none of it

    folder = plan.open_folder()
    report = Reporting(folder)
    with _screen(folder, wanted) as screen:
        announce = report.during(screen.start())
        for note in plan.notes:
            announce(Note(note))
        end = _run(plan, folder, announce)
        began = _began(end, folder, is_resumed=plan.folder is not None)
        if began:
            report.finish(screen)
    if wanted.debug and folder.log.exists():
        print(visible(folder.log.read_text(encoding="utf-8", errors="replace")), file=sys.stderr)
    if isinstance(end, Failed):
        raise _failure(end, folder, began)
    if wanted.quiet:
        print(last_line(Result.read(folder.path)))
    else:
        show_result(Result.read(folder.path), scores(folder, report.rollouts), Console(highlight=False))
    return _say_how_to_resume(end, folder)


def _run(plan: Plan, folder: RunFolder, announce: Announce) -> Failed | Ended:
    from aitrain.launch.processes import Processes  # likewise: it brings what talks to a vLLM server

    try:
        end = Processes(plan, folder, announce).run()
    except BaseException as error:
        _note_end(folder, "stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    if isinstance(end, Failed):
        _note_end(folder, "stopped" if end.exit_code == Interrupted.exit_code else end.status)
    return end


def _note_end(folder: RunFolder, status: str) -> None:
    with suppress(OSError):  # which is perhaps what the run has failed of
        folder.write_status(status)


def _screen(folder: RunFolder, wanted: Wanted) -> Screen:
    if wanted.quiet:
        return Screen(Console(quiet=True))
    return Screen(said=LogTail(folder.log)) if wanted.verbose else Screen()


def _began(end: Failed | Ended, folder: RunFolder, is_resumed: bool) -> bool:
    """Whether there is something to look at: not where a run was refused before its first step."""
    was_refused = isinstance(end, Failed) and end.exit_code != RunFailed.exit_code
    return not was_refused or is_resumed or folder.result.exists() or any(True for _ in read_lines(folder.metrics))


def _failure(end: Failed, folder: RunFolder, began: bool) -> AitrainError:
    """The error to show; a run that never began leaves no folder."""
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    if not began:
        folder.discard()
    elif str(folder.log) not in end.message:
        saved = checkpoints_of(folder)
        resume = f"; --resume goes on from step {step_of(saved[0])}" if saved else ""
        error.args = (f"{end.message}\nrun folder: {folder.path} (train.log has the details{resume})",)
    return error


def _say_how_to_resume(end: Ended, folder: RunFolder) -> int:
    if end.status != "stopped":
        return 0
    command = f"aitrain grpo --config {shlex.quote(str(folder.config))} --resume"
    why = f": {end.because}" if end.because else ""
    print(f"stopped after step {end.step} and saved{why}; go on with:\n  {command}", file=sys.stderr)
    return 0 if end.because else 130
