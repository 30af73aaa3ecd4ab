"""Starts a run from the terminal, shows it while it runs, and prints its result or its error."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aitrain.cli.verbosity import Verbosity
from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Announce, Ended, Event, Failed, Note, RunResult, RunStarted, encode
from aitrain.launch.preflight import RunPlan, done_text
from aitrain.launch.processes import Processes, on_stop_signals
from aitrain.launch.ray_processes import launcher_of
from aitrain.runs.checkpoint import checkpoints_of, step_of
from aitrain.runs.new_folder import remarks
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder, read_lines, read_object
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.loading import loading
from aitrain.ui.log_tail import LogTail
from aitrain.ui.overview import Overview
from aitrain.ui.report_writer import ReportWriter
from aitrain.ui.terminal import Screen, last_line, on_standard_error, show_result

WARNINGS = 20
"""Number of warnings that the event of a failure repeats, the last ones."""

if TYPE_CHECKING:
    from aitrain.launch.nodes import NodeGroup
    from aitrain.options.train import TrainConfig
    from aitrain.runs.rollout_index import RolloutIndex


def start(plan: RunPlan, verbosity: Verbosity, given: TrainConfig | None = None, group: NodeGroup | None = None) -> int:
    """Run the plan and show its result; returns the exit code. `given`: the options of the command; `group`: the
    machines on which another launcher started it.

    Raises:
        AitrainError: the run failed; the message names its folder, which is removed if the run never began.
    """
    if plan.nodes is None:
        return _start(plan, verbosity, group)
    from aitrain.cli.node_run import follow, meet

    with on_stop_signals(_interrupt):  # before there are training processes
        met = meet(plan, plan.nodes, given or plan.config, group)
        try:
            return _start(plan, verbosity, met) if plan.nodes.rank == 0 else follow(plan, plan.nodes, met)
        except BaseException:
            met.leave()
            raise


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _start(plan: RunPlan, verbosity: Verbosity, group: NodeGroup | None = None) -> int:
    if plan.folder is not None and plan.is_done:
        return _show_done(plan.folder, verbosity, group)
    with ExitStack() as locks:
        with loading("making the run folder", verbosity.quiet):
            folder = locks.enter_context(plan.open_folder())
        try:
            return _start_in(folder, plan, verbosity, group)
        except KeyboardInterrupt:  # before there were processes that could be asked to stop, or after their end
            if not _has_files(folder):
                folder.discard()
            raise


def _show_done(folder: RunFolder, verbosity: Verbosity, group: NodeGroup | None) -> int:
    """Show the result of a run that had finished before this command."""
    if group is not None:
        group.show_folder(None)
        group.leave()
    if verbosity.as_json:
        for event in (RunStarted(str(folder.path)), RunResult(str(folder.path), read_object(folder.result))):
            sys.stdout.write(encode(event))
        return 0
    if not verbosity.quiet:
        print(done_text(folder), file=sys.stderr)
    _show_result(folder, None, verbosity)
    return 0


def _show_result(folder: RunFolder, rollouts: RolloutIndex | None, verbosity: Verbosity) -> None:
    if verbosity.quiet:
        print(last_line(Result.read(folder.path)))
    else:
        show_result(Result.read(folder.path), Overview(folder.path, rollouts), Console(highlight=False))


def _start_in(folder: RunFolder, plan: RunPlan, verbosity: Verbosity, group: NodeGroup | None) -> int:
    report = ReportWriter(folder)
    if verbosity.as_json:
        return _start_for_program(plan, folder, report, group)
    console = Console(quiet=True) if verbosity.quiet else on_standard_error()
    with Screen(console, LogTail(folder.log) if verbosity.verbose else list) as screen:
        announce = report.during(screen.start())
        for line in start_lines(plan, _near(folder)):
            announce(Note(line, "info"))
        end = _run(plan, folder, announce, group)
        began = _has_begun(folder, end)
        if began:
            report.finish(screen)
    if verbosity.debug and folder.log.exists():
        print(escape_controls(folder.log.read_text(encoding="utf-8", errors="replace")), file=sys.stderr)
    if isinstance(end, Failed):
        raise _failure(plan, end, folder, began)
    folder = _near(folder)
    _show_result(folder, report.rollouts, verbosity)
    if end.status != "stopped":
        return 0
    why = f": {end.because}" if end.because else ""
    command = escape_controls(Overview(folder.path).continuing())
    how = f"; continue with:\n  {command}" if command else ""
    if plan.nodes is not None:
        from aitrain.cli.node_run import how_to_continue

        how = how_to_continue(plan, folder)
    print(f"stopped after step {end.step} and saved{why}{how}", file=sys.stderr)
    return 0 if end.because else 130


def start_lines(plan: RunPlan, folder: RunFolder) -> list[str]:
    """What a run begins with: model, environment, devices, its folder, and how to watch it."""
    config = plan.config
    named = [str(one) for one in config.environments] if len(config.environments) > 1 else [str(config.rl_env or "")]
    environment = ", ".join(filter(None, named)) or f"{config.rl_env_module}:{config.rl_env_class or ''}".rstrip(":")
    device = f"GPU {', '.join(plan.gpus)}" if plan.gpus else "CPU"
    many = f", {plan.processes} processes" if plan.processes > 1 else ""
    trained = "a LoRA adapter" if config.peft else "all weights"
    return [
        f"model {config.model} ({trained}), environment {environment}, on {device}{many}",
        f"run folder {folder.path}; watch it with: aitrain view {shlex.quote(str(folder.path))}",
    ]


def _has_begun(folder: RunFolder, end: Failed | Ended) -> bool:
    """Whether the run came to its first step, or left something to keep."""
    was_refused = isinstance(end, Failed) and end.exit_code != RunFailed.exit_code
    return not was_refused or _has_files(folder)


def _has_files(folder: RunFolder) -> bool:
    """Whether the folder was there before, or has the results of a step."""
    return not folder.made or folder.result.exists() or any(True for _ in read_lines(folder.metrics))


def _start_for_program(plan: RunPlan, folder: RunFolder, report: ReportWriter, group: NodeGroup | None) -> int:
    """Run the plan with its events as JSON lines on standard output."""
    warnings = deque[str](maxlen=WARNINGS)

    def send(event: Event) -> None:
        if isinstance(event, Note) and event.level == "warning":
            warnings.append(event.text)
        sys.stdout.write(encode(event))
        sys.stdout.flush()

    send(RunStarted(str(_near(folder).path)))
    announce = report.during(send)
    end = _run(plan, folder, announce, group)
    began = _has_begun(folder, end)
    if began:
        report.finish(send)
    if isinstance(end, Failed):
        error = _failure(plan, end, folder, began)
        error.warnings = "\n".join(warnings)
        raise error  # the command line writes the last event
    send(RunResult(str(_near(folder).path), read_object(folder.result)))
    return 130 if end.status == "stopped" and not end.because else 0


def _near(folder: RunFolder) -> RunFolder:
    """The folder by its path from the working directory, if it is below: a checkpoint is known by its whole path."""
    path, here = folder.path, Path.cwd()
    return replace(folder, path=path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else folder


def _run(plan: RunPlan, folder: RunFolder, announce: Announce, group: NodeGroup | None) -> Failed | Ended:
    """Announce the plan's notes, and run its processes to their end."""
    for note in (*plan.notes, *remarks(_near(folder), plan.config.project_name)):
        announce(Note(note))
    try:
        end = _processes(plan, folder, announce, group).run()
    except BaseException as error:
        _note_end(folder, "stopped" if isinstance(error, KeyboardInterrupt) else "failed", str(error))
        raise
    if isinstance(end, Failed):
        _note_end(folder, "stopped" if end.exit_code == Interrupted.exit_code else end.status, end.message)
    return end


def _processes(plan: RunPlan, folder: RunFolder, announce: Announce, group: NodeGroup | None) -> Processes:
    if group is None:
        return launcher_of(plan)(plan, folder, announce)
    try:
        group.show_folder(folder.path, plan.checkpoint, folder.epoch)
    except BaseException:
        folder.discard()
        raise
    return Processes(plan, folder, announce, group)


def _note_end(folder: RunFolder, status: str, reason: str) -> None:
    with suppress(OSError):  # the run may have failed with the same error
        folder.write_status(status, reason=reason)


def _failure(plan: RunPlan, end: Failed, folder: RunFolder, began: bool) -> AitrainError:
    """The error to show; a run that never began leaves no folder."""
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    many = ""
    if began and plan.nodes is not None and "--config" not in end.message:
        from aitrain.cli.node_run import how_to_continue

        many = how_to_continue(plan, _near(folder))
    if not began:
        folder.discard()
    elif many:
        error.args = (f"{end.message}{many}",)
    elif str(folder.log) not in end.message:
        saved = checkpoints_of(folder)
        has_log = folder.log.exists() and folder.log.stat().st_size > 0
        notes = ["train.log has the details"] if has_log else []
        notes += [f"--resume continues from step {step_of(saved[0])}"] if saved else []
        more = f" ({'; '.join(notes)})" if notes else ""
        error.args = (f"{end.message}\nrun folder: {folder.path}{more}",)
    return error
