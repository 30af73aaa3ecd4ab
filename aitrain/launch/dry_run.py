"""Starts the process of a dry run, which loads the environment and builds its dataset, and waits for its result."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.errors import AitrainError, EnvironmentFailed, Interrupted, RunFailed
from aitrain.events import Ended, Failed, NotChecked, Note, Phase, decode
from aitrain.execution.process_tree import ProcessTree
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import PYTHON, process_variables
from aitrain.launch.unchecked import not_checked
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs.run_folder import RunFolder

MODULE = "aitrain.jobs.dry_run"


@dataclass
class DryRun:
    """What the process of a dry run has sent."""

    notes: list[Note] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    phase: str = "starting"
    end: Ended | Failed | None = None
    show_phase: Callable[[str], None] | None = None
    """Gets what the process begins to do."""

    def hear(self, line: str) -> None:
        """Take a line of its standard output."""
        match decode(line):
            case Note() as note:
                self.notes.append(note)
            case NotChecked(text):
                self.unchecked.append(text)
            case Phase(text):
                self.phase = text
                if self.show_phase is not None:
                    self.show_phase(text)
            case Ended() | Failed() as end:
                self.end = self.end or end


def dry_run(
    plan: RunPlan,
    show_output: Callable[[str], None] | None = None,
    show_phase: Callable[[str], None] | None = None,
) -> DryRun:
    """Check a run in a process of its own, as far as that is possible without its weights. `show_output` gets what the
    libraries and the environment printed, `show_phase` what the process begins to do.

    Raises:
        AitrainError: the run would be refused, by the same error.
    """
    disable_telemetry(plan.config.telemetry)
    with tempfile.TemporaryDirectory(prefix="aitrain-dry-run-") as parent:
        folder = RunFolder(Path(parent))
        folder.write_config(plan.config)
        found = _run(plan, folder, DryRun(show_phase=show_phase))
        if show_output is not None:
            show_output(folder.log.read_text(encoding="utf-8", errors="replace"))
    if isinstance(found.end, Failed):
        error = AitrainError(found.end.message)
        error.exit_code = found.end.exit_code
        raise error
    found.unchecked += not_checked(plan)
    return found


def _run(plan: RunPlan, folder: RunFolder, found: DryRun) -> DryRun:
    arguments = [str(folder.path), str(plan.batch.processes), *([str(plan.checkpoint)] if plan.checkpoint else [])]
    if plan.config.resume_anyway and plan.checkpoint:
        arguments.append("anyway")
    command, variables = [*PYTHON, "-m", MODULE, *arguments], process_variables(plan)
    log = RedactedLog(folder.log, variables)
    tree = ProcessTree(command, env=variables, stdout=subprocess.PIPE, stderr=log.pipe)
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        tree.kill()

    timer = threading.Timer(plan.config.stall_timeout, give_up)
    timer.start()
    try:
        for line in tree.stdout:
            found.hear(line.decode(errors="replace"))
            if found.end is not None:
                break
        if found.end is None:
            tree.wait()
    except KeyboardInterrupt:
        raise Interrupted("Stopped.") from None
    finally:
        timer.cancel()
        code = tree.close()
        log.close()
        tree.stdout.close()
    found.end = found.end or _silent_end(plan, found, code, is_late.is_set())
    return found


def _silent_end(plan: RunPlan, found: DryRun, code: int, is_late: bool) -> Failed:
    if is_late:
        why = f"The dry run took more than {plan.config.stall_timeout:g} seconds (--stall-timeout), while"
        return Failed(f"{why} {found.phase}", EnvironmentFailed.exit_code)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failed(f"The process ended without an error message while {found.phase}: {how}", RunFailed.exit_code)
