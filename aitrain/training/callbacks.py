"""Trainer callbacks: metrics and progress, stop requests, and evaluation during the training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.errors import EpisodesFailed
from aitrain.events import Announce, Step
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import Best
from aitrain.runs.heartbeat import Progress
from aitrain.runs.metrics_line import MetricsLine
from aitrain.training.run_context import StopRequest
from aitrain.training.run_recorder import RunRecorder


@dataclass
class EvalState:
    """Results of the evaluations so far; a resumed run continues with them."""

    best: Best | None = None
    """With a checkpoint that still exists."""
    owes_evaluation: bool = False
    """Whether an evaluation was due after the last step and was skipped, as the training ended there."""
    is_same: bool = True
    """Whether the options, environment and cases are those of the checkpoint."""
    before: float | None = None
    """Score of the initial policy."""
    scorings: list[MetricsLine] = field(default_factory=list)
    """The evaluations during the training so far that have the present numbers of cases and samples."""

    def add(self, line: MetricsLine) -> bool:
        """Add an evaluation; returns whether its score is the best so far."""
        self.owes_evaluation = False
        if line.eval_score is None:
            return False
        self.scorings.append(line)
        if self.best is not None and line.eval_score <= self.best.score:
            return False
        self.best = Best(line.step, line.eval_score, line.eval_greedy)
        return True

    def has_scored(self, step: int) -> bool:
        """Whether the last evaluation was that of a step."""
        return bool(self.scorings) and self.scorings[-1].step == step


class MetricsReporter(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl and announces each step, on the first process."""

    def __init__(self, recorder: RunRecorder, progress: Progress, announce: Announce) -> None:
        self.recorder = recorder
        self.progress = progress
        self.announce = announce
        self.start = time.monotonic()
        self.first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock for the estimate of the remaining time."""
        self.start, self.first_step = time.monotonic(), state.global_step
        self.progress.step, self.progress.steps = state.global_step, state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs on every process, before the first one logs the step."""
        self.recorder.begin()
        self.progress.step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """Write one line per logging step; skips the summary that transformers logs at the end."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        elapsed = time.monotonic() - self.start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # as reward
        self.recorder.add_metrics(MetricsLine.of_logs(state.global_step, round(elapsed, 3), values))
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.progress.ends_at = round(time.time() + left, 1)
            self.announce(Step(state.global_step, state.max_steps, logs["reward"], left, **_step_summary(logs)))


def _step_summary(logs: dict[str, float]) -> dict[str, Any]:
    """Values that the terminal shows beside step and reward."""
    times = {name.removeprefix("time/"): value for name, value in logs.items() if name.startswith("time/")}
    return {
        "flat_groups": logs.get("frac_reward_zero_std"),
        "truncated": _total(logs, "stopped/max_tokens", "stopped/truncated"),
        "failed": _total(logs, "stopped/env_error", "stopped/env_timeout"),
        "tokens_per_second": logs.get("tokens_per_second"),
        "seconds": times,
    }


def _total(logs: dict[str, float], *names: str) -> float | None:
    values = [logs[name] for name in names if logs.get(name) is not None]
    return sum(values) if values else None


class StopCallback(TrainerCallback):  # type: ignore[misc]
    """Ends training with a checkpoint after the step in which a stop was requested."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """A collective operation, so that every process calls it in every step."""
        if self.stop.on_any_rank() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True


class EvalCallback(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out cases during training, before the checkpoint of the same step is written.

    The last step is scored after the training. A run that continues from there makes up for the evaluation that is due
    after this step.
    """

    def __init__(
        self,
        config: TrainConfig,
        evaluate: Callable[[int], MetricsLine],
        eval_state: EvalState,
        ends_epoch: Callable[[int], bool],
    ) -> None:
        self.config = config
        self.evaluate = evaluate
        self.eval_state = eval_state
        self.ends_epoch = ends_epoch
        self.failure: EpisodesFailed | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Run the evaluation that the end of the training skipped."""
        if self.eval_state.owes_evaluation and self._is_due(state):
            self.eval_state.add(self.evaluate(state.global_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Score if it is due and the run is not stopping; with --save-best, save the best step so far."""
        is_due, is_last = self._is_due(state), state.global_step >= state.max_steps
        # --save-best scores the last step in any case; a run that continues deletes that scoring where none is due
        self.eval_state.owes_evaluation = (is_due and control.should_training_stop) or (
            is_last and (is_due or self.config.save_best)
        )
        if is_due and not is_last and not control.should_training_stop:
            try:
                is_best = self.eval_state.add(self.evaluate(state.global_step))
            except EpisodesFailed as error:
                self.failure, is_best = error, False
                control.should_training_stop = control.should_save = True
            control.should_save |= is_best and self.config.save_best

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """End the run because of an evaluation, when its step is logged and saved.

        Raises:
            EpisodesFailed: too many evaluations in a row have no scores.
        """
        if self.failure is not None:
            raise self.failure

    def _is_due(self, state: TrainerState) -> bool:
        if self.config.eval_strategy == "steps":
            return bool(state.global_step % self.config.eval_steps == 0)
        return self.config.eval_strategy == "epoch" and self.ends_epoch(state.global_step)
