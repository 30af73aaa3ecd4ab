"""Ends a training by its held-out scores (`--until`, `--patience`), and refuses options that could never do so."""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.batch import CaseSchedule
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.runs.early_stop import cases_to_reach, reason_to_stop
from aitrain.runs.mixture import Mixture, bounds_of_mean, cases_of
from aitrain.training.callbacks import EvalState, StopCallback


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
