"""A dry run: one training process that loads no weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aitrain.errors import AitrainError, EnvironmentFailed, Interrupted
from aitrain.events import DRY_RUN_VARIABLE, Event, Failed, Note, Phase
from aitrain.launch.machines import LaunchedRank
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
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
    notes, phases = list[Note](), ["starting"]

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event)
        elif isinstance(event, Phase):
            phases.append(event.text)
            show_phase(event.text)

    with tempfile.TemporaryDirectory(prefix="aitrain-dry-run-") as parent:
        folder = RunFolder(Path(parent))
        folder.write_config(plan.config)
        processes = _AtOnce(replace(plan, launched=None), folder, hear, ranks=[LaunchedRank()])
        processes.variables = {DRY_RUN_VARIABLE: str(plan.batch.processes)}
        end = processes.run()
        if show_output is not None:
            show_output(folder.log.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(end, Failed):
        return notes
    if end.exit_code == Interrupted.exit_code:
        raise Interrupted(end.message)
    if end.status == "stalled":
        seconds = f"{plan.config.stall_timeout:g} seconds (--stall-timeout)"
        raise EnvironmentFailed(f"The dry run made no progress for {seconds}, while {phases[-1]}")
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    raise error


class _AtOnce(Processes):
    """Has nothing to save: a request to stop ends it at once."""

    def stop(self, times: int | None = None) -> None:
        """End the process."""
        super().stop(2)
