"""The context of a run: its options, folder, environment, listener, and requests to stop; and its recorder, for
metrics, rollouts and the source of its environments."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from aitrain import activity
from aitrain.environment.runner import Runner
from aitrain.errors import Interrupted
from aitrain.events import Announce, Note, NoteLevel, Phase
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import read_manifest, rewind
from aitrain.runs.diagnosis import recorded_diagnosis
from aitrain.runs.environment_source import keep_source
from aitrain.runs.heartbeat import Progress
from aitrain.runs.records import MetricsLine, RolloutRecord
from aitrain.runs.run_folder import RunFolder, append_lines, read_object, sync


@dataclass
class StopRequest:
    """A request to stop this process: by Ctrl-C, SIGTERM, the end of the parent process, or the run itself."""

    raises_on_second: bool = False
    """Whether a second request interrupts at once, as in a notebook; a worker may get one signal twice, from its parent
    and from a batch system."""
    requested: bool = False
    reason: str | None = None
    """Set if the run itself requested the stop."""

    def request(self, *_: object) -> None:
        """Request a stop after the current step; also a signal handler."""
        if self.requested and self.raises_on_second:
            raise KeyboardInterrupt
        self.requested = True

    def end_run(self, reason: str) -> None:
        """Request a stop after the current step for a reason of the run itself; the first reason is kept."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Stop now if requested; called before the first step, when there is nothing to save.

        Raises:
            Interrupted: a process was asked to stop.
        """
        if self.on_any_rank():
            raise Interrupted("Stopped before the first step.")

    def on_any_rank(self) -> bool:
        """Whether any rank was asked to stop, so that all of them stop together, for the same reason. Every rank must
        call this."""
        asked = gather_object([(self.requested, self.reason)])
        self.reason = next((reason for _, reason in asked if reason is not None), None)
        return self.reason is not None or any(is_requested for is_requested, _ in asked)


@dataclass(frozen=True)
class RunContext:
    """The inputs of one run in a process."""

    config: TrainConfig
    folder: RunFolder
    runner: Runner
    """Runs the environment; a run closes it at its end."""
    announce: Announce
    """Gets the events of the run."""
    describe: Callable[[Runner], Mapping[str, Any]]
    """Returns what environment.json says of the environments, the packages and the hardware."""
    stop: StopRequest = field(default_factory=StopRequest)
    checkpoint: Path | None = None
    """The checkpoint to resume from, None for a new run."""
    progress: Progress = field(default_factory=Progress)
    """Progress for status.json."""
    check_environments: Callable[[RunContext], None] = lambda *_: None
    """Called before the model is loaded."""
    dry_run_of: int = 0
    """Number of processes of the run if this process only checks it."""

    @cached_property
    def diagnose(self) -> Callable[[MetricsLine], None]:
        """Looks at each line of metrics and each scoring, on the first process."""
        return recorded_diagnosis(self.folder, self.config, self.announce)

    def note(self, text: str | None, level: NoteLevel = "warning") -> None:
        """Show the user a note, which stays on the screen; no-op without a text."""
        if text:
            self.announce(Note(text, level))

    def enter(self, phase: str, moves_files: bool = True) -> None:
        """Begin a phase of the run, for the screen and for the watchdog on every rank."""
        activity.own.enter(phase, moves_files=moves_files)
        self.announce(Phase(phase))

    def give_up_reason(self) -> str:
        """The reason to stop waiting for a vLLM server that is gone; empty to continue."""
        if self.stop.requested:
            return "A stop was requested."
        return str(read_object(self.folder.server).get("why", ""))


# -- records


class RunRecorder:
    """Appends records to the run folder. In a resumed run, the first new record deletes those after the checkpoint, so
    that a run that is killed earlier keeps them."""

    def __init__(self, folder: RunFolder, checkpoint: Path | None) -> None:
        self.folder = folder
        self.resumed_from = None if checkpoint is None else read_manifest(checkpoint)

    def begin(self) -> None:
        """Delete the old records, once. Every process must call this: none may write meanwhile.

        Raises:
            CannotWriteError: another command has the run folder.
        """
        self.folder.check_owner()
        if self.resumed_from is None:
            return
        state = PartialState()
        if state.is_main_process:
            rewind(self.folder, self.resumed_from)
        self.resumed_from = None
        state.wait_for_everyone()

    def add_rollouts(self, records: list[RolloutRecord]) -> None:
        """Append one line per episode to this process's own file. Every process must call this."""
        self.begin()
        self.folder.rollouts.mkdir(exist_ok=True)
        append_lines(self._own_rollouts, (record.to_json() for record in records))

    def add_metrics(self, line: MetricsLine) -> None:
        """Append one line of metrics. Only the first process may call this, after `begin`."""
        append_lines(self.folder.metrics, [line.to_json()])

    def sync(self) -> None:
        """Make this process's records survive a power cut: a checkpoint must not be newer than its records."""
        state = PartialState()
        files = [self._own_rollouts, *([self.folder.metrics] if state.is_main_process else [])]
        for file in files:
            if file.exists():
                sync(file)

    @property
    def _own_rollouts(self) -> Path:
        return self.folder.rollouts / f"rank{PartialState().process_index}.jsonl"


def keep_sources(runner: Runner, folder: RunFolder) -> None:
    """Keep the source of the environment, or of each in a folder of its name."""
    shutil.rmtree(folder.environment_source, ignore_errors=True)
    for name, part in runner.parts.items():
        keep_source(part.environment, folder.environment_source / name)
