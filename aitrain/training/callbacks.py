"""Between the steps: metrics are written, progress is told, stops are obeyed, held-out cases are scored."""

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

from aitrain.checkpoint import Best
from aitrain.config import TrainConfig
from aitrain.errors import Interrupted
from aitrain.events import Announce, Step
from aitrain.heartbeat import Progress
from aitrain.runs.metrics_line import MetricsLine
from aitrain.training.run_recorder import RunRecorder

Scores: TypeAlias = tuple[float | None, float | None]
"""Mean score of sampled and of greedy completions."""


@dataclass
class Standing:
    """What a run knows of its evaluations, and what a resumed one must know as well."""

    best: Best | None = None
    owes_evaluation: bool = False
    """Held-out cases were due after the last step, and the run was asked to stop."""
    is_same: bool = True
    """Whether the run goes on as the one that it was."""


@dataclass
class StopRequest:
    """Whether somebody asked this process to stop: Ctrl-C, SIGTERM, or a parent that is gone."""

    raises_when_asked_twice: bool = False
    """For a notebook; a worker is ended from outside, and may be asked by its parent and by torchrun alike."""
    asked: bool = False
    because: str | None = None
    """Why the run itself wants to end, where nobody asked."""

    def ask(self, *_: object) -> None:
        """Ask it to stop at the next good moment."""
        if self.asked and self.raises_when_asked_twice:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def on_signals(self) -> Iterator[StopRequest]:
        """While this lasts, SIGINT and SIGTERM ask; only the main thread can be told of signals."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: self._take(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: signal.Signals) -> Callable[[int, FrameType | None], Any] | int | None:
        return signal.signal(number, self.ask)

    def want(self, because: str) -> None:
        """End the run at the next good moment, for a reason of its own."""
        self.because = self.because or because

    def check(self) -> None:
        """Between the parts of a run, before there is anything to save.

        Raises:
            Interrupted: some process was asked to stop.
        """
        if self.anywhere():
            raise Interrupted("Stopped before the first step.")

    def anywhere(self) -> bool:
        """Whether any process was asked: they stop together, or the rest would wait for it."""
        state, wanted = PartialState(), self.asked or self.because is not None
        if state.num_processes == 1:
            return wanted
        return bool(reduce(torch.tensor(int(wanted), device=state.device), reduction="sum").item())


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl, notes how far the run is and tells the screen, on the first process."""

    def __init__(self, history: RunRecorder, progress: Progress, announce: Announce) -> None:
        self.history = history
        self.progress = progress
        self.announce = announce
        self.start = time.monotonic()
        self.first_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The clock for the time left starts here."""
        self.start, self.first_step = time.monotonic(), state.global_step
        self.progress.step, self.progress.steps = state.global_step, state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """On every process, before the first of them logs the step."""
        self.history.begin()
        self.progress.step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        """One line a logging step; the summary that transformers logs at the end is no step."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        elapsed = time.monotonic() - self.start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # reward says it
        self.history.add_metrics(MetricsLine.of_logs(state.global_step, round(elapsed, 3), values))
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.announce(Step(state.global_step, state.max_steps, logs["reward"], left, **_at_a_glance(logs)))


def _at_a_glance(logs: dict[str, Any]) -> dict[str, Any]:
    """What the screen shows beside step and reward."""
    times = {name.removeprefix("time/"): value for name, value in logs.items() if name.startswith("time/")}
    return {
        "flat_groups": logs.get("frac_reward_zero_std"),
        "truncated": _total(logs, "stopped/max_tokens", "stopped/truncated"),
        "failed": _total(logs, "stopped/env_error", "stopped/env_timeout"),
        "tokens_per_second": logs.get("tokens_per_second"),
        "seconds": times,
    }


def _total(logs: dict[str, Any], *names: str) -> float | None:
    values = [logs[name] for name in names if logs.get(name) is not None]
    return sum(values) if values else None


class Stopper(TrainerCallback):  # type: ignore[misc]
    """Ends the training with a checkpoint after the step in which a stop was asked for."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Asked on every process in every step, because all of them must ask or none."""
        if self.stop.anywhere() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True


class Evaluator(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out cases during training. The end of training has its own evaluation, and with --save-best one
    more before it, in which the last step competes with the others.

    It comes before the checkpoint of the same step, also at the end of an epoch: a run that is killed meanwhile goes on
    from before it.
    """

    def __init__(
        self,
        config: TrainConfig,
        evaluate: Callable[[int], Scores],
        standing: Standing,
        ends_epoch: Callable[[int], bool],
    ) -> None:
        self.config = config
        self.evaluate = evaluate
        self.standing = standing
        self.ends_epoch = ends_epoch

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What a run that was stopped still owed."""
        if self.standing.owes_evaluation:
            self._evaluate(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Where it is due and the run is not being stopped; the best score so far is saved when that is wanted."""
        is_last = state.global_step >= state.max_steps
        self.standing.owes_evaluation = (
            self.config.save_best if is_last else self._is_due(state) and control.should_training_stop
        )
        if self._is_due(state) and not control.should_training_stop:
            is_best = self._evaluate(state.global_step)
            control.should_save |= is_best and self.config.save_best

    def score_last_step(self, step: int) -> None:
        """After the training, with --save-best: the last step is a candidate as well."""
        self._evaluate(step)

    def _is_due(self, state: TrainerState) -> bool:
        if state.global_step >= state.max_steps:
            return False
        if self.config.eval_strategy == "steps":
            return bool(state.global_step % self.config.eval_steps == 0)
        return self.config.eval_strategy == "epoch" and self.ends_epoch(state.global_step)

    def _evaluate(self, step: int) -> bool:
        """Whether this is the best score so far."""
        self.standing.owes_evaluation = False
        sampled, greedy = self.evaluate(step)
        if sampled is None or (self.standing.best is not None and sampled <= self.standing.best.score):
            return False
        self.standing.best = Best(step, sampled, greedy)
        return True
