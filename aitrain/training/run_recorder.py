"""Writes metrics and rollouts, without gaps and duplicates when a run is resumed."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState

from aitrain.runs.checkpoint import read_manifest, rewind
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, append_lines, append_text, json_lines, read_lines, sync, write_text


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
        append_text(self._own_rollouts, json_lines(record.to_json() for record in records))

    def add_metrics(self, line: MetricsLine) -> None:
        """Append one line of metrics; a scoring stands before the line of its step, also if it was made up for later.
        Only the first process may call this, after `begin`."""
        before = list(read_lines(self.folder.metrics)) if line.is_scoring else []
        if before and before[-1].get("step") == line.step:
            write_text(self.folder.metrics, json_lines([*before[:-1], line.to_json(), before[-1]]))
        else:
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
