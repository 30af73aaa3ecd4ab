"""Reports the diagnosis of a run while it trains, on the first process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import line_stays
from aitrain.runs.diagnosis import Diagnosis, finding_line, recorded_findings, traits_of
from aitrain.runs.level_rules import RunTraits, Values
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.run_folder import append_lines, keep_lines
from aitrain.training.run_recorder import RunRecorder


def run_traits(config: TrainConfig, arguments: GRPOConfig) -> RunTraits:
    """What diagnostics must know of the settings of a run."""
    by_sequence = str(arguments.vllm_importance_sampling_mode).startswith("sequence")
    flags = ", ".join(config.reshaped_sampling)
    return replace(traits_of(config.written()), ratio_by_sequence=by_sequence, reshaped_sampling=flags)


class DiagnosticsCallback(TrainerCallback):  # type: ignore[misc]
    """Looks at each line of metrics and each scoring. A finding is recorded before it is shown, so that a resumed run
    does not show it again."""

    def __init__(self, notify: Callable[[str], None], recorder: RunRecorder, traits: RunTraits) -> None:
        self.notify = notify
        self.recorder = recorder
        self.diagnosis = Diagnosis(traits)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Read the metrics up to the checkpoint of a resumed run."""
        if not state.is_world_process_zero:
            return
        folder, checkpoint = self.recorder.folder, self.recorder.resumed_from
        self.diagnosis.reported |= {finding.name for finding in recorded_findings(folder)}
        folder.diagnostics.touch()
        keep_lines(folder.diagnostics, lambda _: True)  # a killed process may have left half a line
        for line in read_metrics(folder.metrics):
            if checkpoint is None or line_stays(checkpoint, line):
                self.see(line)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Values, **_: object
    ) -> None:
        """Look at a line of metrics; the summary at the end of training has no reward."""
        if state.is_world_process_zero and "reward" in logs:
            self.see(MetricsLine.of_logs(state.global_step, 0.0, logs))

    def see(self, line: MetricsLine) -> None:
        """Look at a line of metrics, or at a scoring; only the first process may call this."""
        for finding in self.diagnosis.see(line):
            append_lines(self.recorder.folder.diagnostics, [finding_line(finding)])
            self.notify(finding.text)
