"""Runs one eval in its folder, and shows its progress."""

from __future__ import annotations

import shlex
import sys

from rich.console import Console

from aitrain.cli.verbosity import Verbosity
from aitrain.errors import AitrainError, Interrupted
from aitrain.events import Ended, Failed, Note, Phase
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.eval_result import JOB
from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.new_folder import remarks
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.log_tail import LogTail
from aitrain.ui.report_writer import ReportWriter
from aitrain.ui.terminal import Screen, on_standard_error


def run_eval(plan: RunPlan, config: EvalConfig, folder: RunFolder, verbosity: Verbosity) -> None:
    """Run an eval in its folder, which is locked.

    Raises:
        AitrainError: it failed or was stopped; the message names its folder, which is removed if nothing was scored.
    """
    try:
        end = _play(plan, config, folder, verbosity)
    except KeyboardInterrupt:  # before there were processes to stop
        if not _has_records(folder):
            folder.discard()
        raise
    if verbosity.debug and folder.log.exists():
        print(escape_controls(folder.log.read_text(encoding="utf-8", errors="replace")), file=sys.stderr)
    if isinstance(end, Failed):
        raise _failure(end, folder, bool(folder.made) and not _has_records(folder))


def _play(plan: RunPlan, config: EvalConfig, folder: RunFolder, verbosity: Verbosity) -> Failed | Ended:
    report = ReportWriter(folder)
    console = Console(quiet=True) if verbosity.quiet else on_standard_error()
    with Screen(console, LogTail(folder.log) if verbosity.verbose else list) as screen:
        announce = report.during(screen.start())
        announce(Phase(f"evaluating {config.model}"))
        for remark in remarks(folder, config.project_name, is_eval=True):
            announce(Note(remark))
        folder.write_config(config)
        folder = folder.claimed(1, job=JOB, **sign_of_life())
        try:
            end = Processes(plan, folder, announce).run()
        except BaseException as error:
            folder.write_status("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        if isinstance(end, Failed):
            folder.write_status("stopped" if end.exit_code == Interrupted.exit_code else end.status)
        if _has_records(folder):
            report.finish(screen)
    return end


def _has_records(folder: RunFolder) -> bool:
    """Whether something was scored."""
    return any(True for file in folder.rollouts.glob("*.jsonl") for _ in read_lines(file))


def _failure(end: Failed, folder: RunFolder, is_empty: bool) -> AitrainError:
    """The error to show, with the command that continues; an eval that scored nothing leaves no folder."""
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    if is_empty:
        folder.discard()
        return error
    command = f"aitrain eval --config {shlex.quote(str(folder.config))} --resume"
    error.args = (
        f"{end.message}\neval folder: {folder.path} (train.log has the details); continue with:\n  {command}",
    )
    return error
