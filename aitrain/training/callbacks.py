"""Trainer callbacks: metrics and progress, and the user's own (`--custom-callbacks`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.environment.user_modules import load_function
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.events import Step
from aitrain.execution.user_code import failure_message
from aitrain.options.train import TrainConfig
from aitrain.runs.records import MetricsLine, read_metrics
from aitrain.training.run_context import RunContext, RunRecorder


class MetricsReporter(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl, announces each step, and passes lines on for a diagnosis, on the first process."""

    def __init__(self, context: RunContext, recorder: RunRecorder) -> None:
        self.context, self.recorder = context, recorder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock for the estimate of the remaining time, and look at the metrics up to the checkpoint of a
        resumed run."""
        self.start, self.first_step = time.monotonic(), state.global_step
        self.context.progress.step, self.context.progress.steps = state.global_step, state.max_steps
        if not state.is_world_process_zero:
            return
        checkpoint = self.recorder.resumed_from
        for line in read_metrics(self.context.folder.metrics):
            if checkpoint is None or line.step <= checkpoint.step:
                self.context.diagnose(line)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs on every process, before the first one logs the step."""
        self.recorder.begin()
        self.context.progress.step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """Write one line per logging step; skips the summary that transformers logs at the end."""
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        elapsed = time.monotonic() - self.start
        values = {name: value for name, value in logs.items() if not name.startswith("rewards/")}  # as reward
        line = MetricsLine.of_logs(state.global_step, round(elapsed, 3), values)
        self.recorder.add_metrics(line)
        if "reward" in logs:
            pace = elapsed / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.context.progress.ends_at = round(time.time() + left, 1)
            self.context.announce(
                Step(
                    state.global_step,
                    state.max_steps,
                    logs["reward"],
                    left,
                    flat_groups=logs.get("frac_reward_zero_std"),
                    truncated=logs.get("stopped/max_tokens", 0.0) + logs.get("stopped/truncated", 0.0),
                    failed=logs.get("stopped/env_error", 0.0) + logs.get("stopped/env_timeout", 0.0),
                    tokens_per_second=logs.get("tokens_per_second"),
                    seconds={name[5:]: value for name, value in logs.items() if name.startswith("time/")},
                )
            )
            self.context.diagnose(line)


# -- the user's own


def custom_callbacks(config: TrainConfig, end_run: Callable[[str], None]) -> list[TrainerCallback]:
    """The callbacks of a run, in the order of the option, each made by a call without arguments. One that stops the
    training calls `end_run`, so that all ranks stop after the same step, with a checkpoint.

    Raises:
        ConfigError: one of them cannot be found, or is no callback.
        EnvironmentFailed: its module cannot be imported, or the call raised.
    """
    made = list[TrainerCallback]()
    for place in filter(None, (config.custom_callbacks or "").split(",")):
        callback = _call_user(place, load_function("custom_callbacks", place))
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(
                f"custom_callbacks: {place} gives {type(callback).__name__}, not a transformers.TrainerCallback\n"
                "Name a class of callbacks, or a function without arguments that returns one."
            )
        for event in [name for name in dir(type(callback)) if name.startswith("on_")]:
            heard = partial(_call_user, f"{place}, {event}", getattr(callback, event))
            setattr(callback, event, partial(_passing_stop, heard, partial(end_run, f"{place} stopped the training")))
        made.append(callback)
    return made


def _passing_stop(
    event: Callable[..., TrainerControl | None], end_run: Callable[[], None], *arguments: Any, **keywords: Any
) -> TrainerControl:
    *_, control = arguments
    was_stopping = control.should_training_stop
    control = event(*arguments, **keywords) or control
    if control.should_epoch_stop or (control.should_training_stop and not was_stopping):
        control.should_training_stop = control.should_epoch_stop = False  # the run is one epoch of transformers
        end_run()
    return control


def _call_user(place: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The user's function, whose errors name it and the line of the user's code."""
    try:
        return function(*arguments, **keywords)
    except AitrainError:
        raise
    except Exception as error:
        raise EnvironmentFailed(failure_message(f"custom_callbacks: {place} raised", error)) from error
