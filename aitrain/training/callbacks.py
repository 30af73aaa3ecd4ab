"""Trainer callbacks: metrics and progress, stop requests, evaluation during the training and its end by held-out
scores (`--until`, `--patience`), and the user's own (`--custom-callbacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.batch import CaseSchedule
from aitrain.environment.user_modules import load_function
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed, EpisodesFailed
from aitrain.events import Announce, Step
from aitrain.execution.user_code import failure_message
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import Best
from aitrain.runs.early_stop import cases_to_reach, reason_to_stop
from aitrain.runs.heartbeat import Progress
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.mixture import Mixture, bounds_of_mean, cases_of
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


# -- the user's own


def custom_callbacks(config: TrainConfig, end_run: Callable[[str], None]) -> list[TrainerCallback]:
    """The callbacks of a run, in the order of the option, each made by a call without arguments. One that stops the
    training calls `end_run`, so that all ranks stop after the same step, with a checkpoint.

    Raises:
        ConfigError: one of them cannot be found, or is no callback.
        EnvironmentFailed: its module cannot be imported, or the call raised.
    """
    places = (config.custom_callbacks or "").split(",") if config.custom_callbacks else []
    return [_load_callback(place, end_run) for place in places]


def _load_callback(place: str, end_run: Callable[[str], None]) -> TrainerCallback:
    make = load_function("custom_callbacks", place)
    callback = _call_user(place, make)
    if not isinstance(callback, TrainerCallback):
        raise ConfigError(
            f"custom_callbacks: {place} gives {type(callback).__name__}, not a transformers.TrainerCallback\n"
            "Name a class of callbacks, or a function without arguments that returns one."
        )
    for event in [name for name in dir(type(callback)) if name.startswith("on_")]:
        heard = partial(_call_user, f"{place}, {event}", getattr(callback, event))
        setattr(callback, event, partial(_passing_stop, heard, partial(end_run, f"{place} stopped the training")))
    return callback


def _passing_stop(
    event: Callable[..., TrainerControl | None],
    end_run: Callable[[], None],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **keywords: Any,
) -> TrainerControl:
    was_stopping = control.should_training_stop
    control = event(args, state, control, **keywords) or control
    if control.should_training_stop and not was_stopping:
        control.should_training_stop = False
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


# -- the end by held-out scores


class TrainingOver(Exception):
    """Raised before the first step of a resumed training whose last evaluation ends it; transformers has no other way
    to leave."""


class EarlyStop(TrainerCallback):  # type: ignore[misc]
    """Ends the training, with a checkpoint, after an evaluation that --until or --patience asks for. Every process has
    the same scores, and so ends after the same step."""

    def __init__(self, config: TrainConfig, eval_state: EvalState, stopper: StopCallback) -> None:
        self.config = config
        self.eval_state = eval_state
        self.stopper = stopper
        self.reason: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Runs after an evaluation that was skipped before."""
        if self._ends_at(state.global_step):
            raise TrainingOver

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Runs after EvalCallback."""
        if self._ends_at(state.global_step):
            control.should_training_stop = control.should_save = True

    def _ends_at(self, step: int) -> bool:
        config, seen = self.config, self.eval_state
        if seen.has_scored(step):
            self.reason = reason_to_stop(config.until, config.patience, seen.before, seen.scorings)
        if self.reason is not None:
            self.stopper.stopped = True
            self.stopper.stop.end_run(self.reason)
        return self.reason is not None


def check_stopping(config: TrainConfig, mixture: Mixture, schedule: CaseSchedule) -> str | None:
    """Check that --until and --patience can end the training by their cases; returns a note if --patience cannot.

    Raises:
        ConfigError: there is no evaluation during the training, or no scores of so few cases reach --until.
    """
    name = "until" if config.until is not None else "patience"
    if config.until is None and config.patience is None:
        return None
    if not cases_of(mixture):
        raise ConfigError(f"{name}: no cases are held out\nSet --eval-cases, or add cases to the dataset.")
    evaluations = _evaluations(config, schedule)
    if not evaluations:
        raise ConfigError(
            f"{name}: there is no evaluation before the last of the {schedule.steps} steps\n"
            f"Use --eval-strategy steps --eval-steps {max(1, schedule.steps // 10)}, or another number."
        )
    if config.until is not None and (bounds := bounds_of_mean(mixture)) is not None:
        needed = cases_to_reach(config.until, mixture)
        if needed is None:
            raise ConfigError(f"until: {config.until:g} must be below {bounds[1]:g}, the highest score")
        if needed:
            needed, half = (2 * needed, ", as --save-best takes half of them") if config.save_best else (needed, "")
            raise ConfigError(
                f"until: with {cases_of(mixture)} held-out cases not even perfect scores have an interval that begins"
                f" at {config.until:g}\nUse --eval-cases {needed} or more{half}, or a lower --until."
            )
    if config.patience is not None and config.patience > evaluations:
        return f"--patience {config.patience} cannot end this run: evaluations before the last step: {evaluations}."
    return None


def _evaluations(config: TrainConfig, schedule: CaseSchedule) -> int:
    """Number of evaluations before the last step."""
    if config.eval_strategy == "steps":
        return (schedule.steps - 1) // config.eval_steps
    return sum(map(schedule.ends_epoch, range(1, schedule.steps))) if config.eval_strategy == "epoch" else 0
