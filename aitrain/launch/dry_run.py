"""Starts the process of a dry run, a training process that loads no weights, and waits for its end."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from aitrain.errors import AitrainError, EnvironmentFailed, Interrupted, RunFailed
from aitrain.events import DRY_RUN_VARIABLE, Ended, Failed, Note, Phase, decode
from aitrain.execution.process_tree import ProcessTree
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import process_variables, worker_command
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs.run_folder import RunFolder


def dry_run(
    plan: RunPlan,
    show_output: Callable[[str], None] | None = None,
    show_phase: Callable[[str], None] = lambda _: None,
) -> list[Note]:
    """Check a run in a process of its own, as far as that is possible without its weights; returns its notes.
    `show_output` gets what the libraries and the environment printed, `show_phase` what the process begins to do.

    Raises:
        AitrainError: the run would be refused, by the same error.
    """
    disable_telemetry(plan.config.telemetry)
    variables = {**process_variables(plan), DRY_RUN_VARIABLE: str(plan.batch.processes)}
    notes, phase, is_late = list[Note](), "starting", threading.Event()
    end: Failed | Ended | None = None
    with tempfile.TemporaryDirectory(prefix="aitrain-dry-run-") as parent:
        folder = RunFolder(Path(parent))
        folder.write_config(plan.config)
        log = RedactedLog(folder.log, variables)
        command = worker_command(plan, folder, plan.checkpoint)
        tree = ProcessTree(command, env=variables, stdout=subprocess.PIPE, stderr=log.pipe)

        def give_up() -> None:
            is_late.set()
            tree.kill()

        timer = threading.Timer(plan.config.stall_timeout, give_up)
        timer.start()
        try:
            for line in tree.stdout:
                match decode(line.decode(errors="replace")):
                    case Note() as note:
                        notes.append(note)
                    case Phase(phase):
                        show_phase(phase)
                    case Ended() | Failed() as end:
                        break
            else:
                tree.wait()
        except KeyboardInterrupt:
            raise Interrupted("Stopped.") from None
        finally:
            timer.cancel()
            code = tree.close()
            log.close()
            tree.stdout.close()
        if show_output is not None:
            show_output(folder.log.read_text(encoding="utf-8", errors="replace"))
    if end is None and is_late.is_set():
        late = f"The dry run took more than {plan.config.stall_timeout:g} seconds (--stall-timeout), while {phase}"
        raise EnvironmentFailed(late)
    if end is None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise RunFailed(f"The process ended without an error message while {phase}: {how}")
    if isinstance(end, Failed):
        error = AitrainError(end.message)
        error.exit_code = end.exit_code
        raise error
    return notes
