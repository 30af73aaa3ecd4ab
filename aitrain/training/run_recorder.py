"""What a run has recorded: metrics and rollouts, without a gap and without a double line when it is resumed."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState

from aitrain.runs.checkpoint import read_manifest, rewind
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, append_lines, sync


class RunRecorder:
    """Where records go. What followed the checkpoint that a run goes on from is forgotten when the first new record
    comes, and not before: a resumed run that is killed until then has lost nothing."""

    def __init__(self, folder: RunFolder, checkpoint: Path | None) -> None:
        self.folder = folder
        self.resumed_from = None if checkpoint is None else read_manifest(checkpoint)

    def begin(self) -> None:
        """Before anything new; every process must call this, as none may write while the first one forgets."""
        if self.resumed_from is None:
            return
        state = PartialState()
        if state.is_main_process:
            rewind(self.folder, self.resumed_from)
        self.resumed_from = None
        state.wait_for_everyone()

    def add_rollouts(self, records: list[RolloutRecord]) -> None:
        """One line an episode, in this process's own file; every process must call this."""
        self.begin()
        self.folder.rollouts.mkdir(exist_ok=True)
        append_lines(self._own_rollouts, (record.to_json() for record in records))

    def add_metrics(self, line: MetricsLine) -> None:
        """One line, from the first process, after all of them have begun."""
        append_lines(self.folder.metrics, [line.to_json()])

    def sync(self) -> None:
        """What this process has recorded survives a power cut: a checkpoint must not be older than its history."""
        files = [self._own_rollouts, *([self.folder.metrics] if PartialState().is_main_process else [])]
        for file in files:
            if file.exists():
                sync(file)

    @property
    def _own_rollouts(self) -> Path:
        return self.folder.rollouts / f"rank{PartialState().process_index}.jsonl"
