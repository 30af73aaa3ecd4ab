"""Trainer callbacks: metrics and progress, stop requests, and scoring of held-out cases."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.errors import Interrupted
from aitrain.events import Announce, Step
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import Best
from aitrain.runs.heartbeat import Progress
from aitrain.runs.metrics_line import MetricsLine
from aitrain.training.run_recorder import RunRecorder

MeanScores: TypeAlias = tuple[float | None, float | None]
"""Mean score of the sampled and of the greedy completions."""


@dataclass
class EvalState:
    """Results of the evaluations so far; a resumed run continues with them."""

    best: Best | None = None
    owes_evaluation: bool = False
    """Whether an evaluation was due after the last step, and was skipped because the run was asked to stop."""
    is_same: bool = True
    """Whether the options, environment and cases are those of the checkpoint."""


@dataclass
class StopRequest:
    """A request to stop this process: by Ctrl-C, SIGTERM, the end of the parent process, or the run itself."""

    raises_when_asked_twice: bool = False
    """True in a notebook. A worker may get the same signal from its parent and from torchrun."""
    asked: bool = False
    because: str | None = None
    """The reason if the run itself requested the stop."""

    def ask(self, *_: object) -> None:
        """Request a stop after the current step; also a signal handler."""
        if self.asked and self.raises_when_asked_twice:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def on_signals(self) -> Iterator[StopRequest]:
        """Handle SIGINT and SIGTERM as stop requests; Python delivers signals to the main thread only."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: self._take(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: signal.Signals) -> Callable[[int, FrameType | None], object] | int | None:
        return signal.signal(number, self.ask)

    def want(self, because: str) -> None:
        """Request a stop after the current step for a reason of the run itself; the first reason is kept."""
        self.because = self.because or because

    def check(self) -> None:
        """Stop here if requested; called before the first step, when there is nothing to save.

        Raises:
            Interrupted: a process was asked to stop.
        """
        if self.anywhere():
            raise Interrupted("Stopped before the first step.")

    def anywhere(self) -> bool:
        """Whether any process was asked to stop, so that all of them stop together. Every process must call this."""
        state, wanted = PartialState(), self.asked or self.because is not None
        if state.num_processes == 1:
            return wanted
        return bool(reduce(torch.tensor(int(wanted), device=state.device), reduction="sum").item())


class MetricsReporter(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl and announces each step, on the first process."""

    def __init__(self, history: RunRecorder, progress: Progress, announce: Announce) -> None:
        self.history = history
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
        self.history.begin()
        self.progress.step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """Write one line per logging step; skips the summary that transformers logs at the end."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        elapsed = time.monotonic() - self.start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # as reward
        self.history.add_metrics(MetricsLine.of_logs(state.global_step, round(elapsed, 3), values))
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.announce(Step(state.global_step, state.max_steps, logs["reward"], left, **_step_summary(logs)))


def _step_summary(logs: dict[str, float]) -> dict[str, Any]:
    """What the terminal shows beside step and reward."""
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
        if self.stop.anywhere() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True


class EvalCallback(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out cases during training, before the checkpoint of the same step is written.

    The end of training has an evaluation of its own. With --save-best it is preceded by one more scoring, in which the
    last step competes with the earlier ones.
    """

    def __init__(
        self,
        config: TrainConfig,
        evaluate: Callable[[int], MeanScores],
        standing: EvalState,
        ends_epoch: Callable[[int], bool],
    ) -> None:
        self.config = config
        self.evaluate = evaluate
        self.standing = standing
        self.ends_epoch = ends_epoch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Make up for the evaluation that a stop request skipped."""
        if self.standing.owes_evaluation:
            self._evaluate(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Score if it is due and the run is not stopping; with --save-best, save the best step so far."""
        is_last = state.global_step >= state.max_steps
        self.standing.owes_evaluation = (
            self.config.save_best if is_last else self._is_due(state) and control.should_training_stop
        )
        if self._is_due(state) and not control.should_training_stop:
            is_best = self._evaluate(state.global_step)
            control.should_save |= is_best and self.config.save_best

    def score_last_step(self, step: int) -> None:
        """With --save-best, score the last step after training."""
        self._evaluate(step)

    def _is_due(self, state: TrainerState) -> bool:
        if state.global_step >= state.max_steps:
            return False
        if self.config.eval_strategy == "steps":
            return bool(state.global_step % self.config.eval_steps == 0)
        return self.config.eval_strategy == "epoch" and self.ends_epoch(state.global_step)

    def _evaluate(self, step: int) -> bool:
        """Score the held-out cases; returns whether the score is the best so far."""
        self.standing.owes_evaluation = False
        sampled, greedy = self.evaluate(step)
        if sampled is None or (self.standing.best is not None and sampled <= self.standing.best.score):
            return False
        self.standing.best = Best(step, sampled, greedy)
        return True
