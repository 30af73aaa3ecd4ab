"""Between the steps: metrics are written, progress is told, stops are obeyed, held-out cases are scored."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.config import TrainConfig
from aitrain.errors import Interrupted
from aitrain.events import Announce, Step
from aitrain.heartbeat import Progress
from aitrain.run_folder import RunFolder, append_lines


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
            raise Interrupted("Stopped before the first step: there is nothing to resume.")

    def anywhere(self) -> bool:
        """Whether any process was asked: they stop together, or the rest would wait for it."""
        state, wanted = PartialState(), self.asked or self.because is not None
        if state.num_processes == 1:
            return wanted
        return bool(reduce(torch.tensor(int(wanted), device=state.device), reduction="sum").item())


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl, notes how far the run is and tells the screen, on the first process."""

    def __init__(self, folder: RunFolder, progress: Progress, announce: Announce) -> None:
        self.folder = folder
        self.progress = progress
        self.announce = announce
        self.start = time.monotonic()
        self.first_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The clock for the time left starts here."""
        self.start, self.first_step = time.monotonic(), state.global_step
        self.progress.step, self.progress.steps = state.global_step, state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """For the heartbeat."""
        self.progress.step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        """One line a logging step; the summary that transformers logs at the end is no step."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        elapsed = time.monotonic() - self.start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # reward says it
        append_lines(self.folder.metrics, [{"step": state.global_step, "seconds": round(elapsed, 3)} | values])
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.announce(Step(state.global_step, state.max_steps, logs["reward"], left))


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
    """Scores the held-out cases during training; the end of training has its own evaluation."""

    def __init__(self, config: TrainConfig, evaluate: Callable[[int], None]) -> None:
        self.config = config
        self.evaluate = evaluate

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Every `eval_steps` steps."""
        is_due = self.config.eval_strategy == "steps" and state.global_step % self.config.eval_steps == 0
        if is_due and state.global_step < state.max_steps:
            self.evaluate(state.global_step)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """After every epoch but the last, and not when the run is being stopped."""
        is_due = self.config.eval_strategy == "epoch" and not control.should_training_stop
        if is_due and state.global_step < state.max_steps:
            self.evaluate(state.global_step)
