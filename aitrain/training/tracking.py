"""Reports a run to wandb, tensorboard and trackio.

The callbacks of transformers report the metrics, this module options and held-out scores. A tracker that fails is
removed with a note: no run ends because of it.

What it uses of transformers 5.17 (tests/training/test_tracking.py trains with the real libraries):

    get_reporting_integration_callbacks([name])     the class for each name, called without arguments
    callback.on_train_begin(...)                    opens the tracker's run, also before the training; wandb's takes
                                                    one that is open already
    callback.on_log(..., logs=)                     metrics, at state.global_step
    callback.on_train_begin(..., model=)            reports the model's configuration, as model_config in tensorboard
    TensorBoardCallback.logging_dir                 set before it opens
    TrainingArguments.project                       trackio's project, `huggingface` by default
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from aitrain import activity
from aitrain.events import Evaluated
from aitrain.execution.user_code import describe_error
from aitrain.redaction import without_secrets
from aitrain.training.run_context import RunContext

PROJECT = "aitrain"
"""Project of the runs, unless the tracker's own variable names one."""


class Tracking(TrainerCallback):  # type: ignore[misc]
    """Reports to all trackers of a run; other processes than the first have none."""

    def __init__(self, context: RunContext, trainer: Trainer) -> None:
        """Open the trackers."""
        self.context, self.trainer = context, trainer
        self._opened: list[str] = []
        """Trackers whose run was opened here, and not before."""
        names = [name for name in context.config.log.split(",") if name != "none"]
        self.trackers: dict[str, Any] = dict.fromkeys(names if PartialState().is_main_process else ())
        """The callbacks of transformers by the names of the trackers."""
        self._each(self._open)

    def _each(self, act: Callable[[str, Any], object]) -> None:
        for name, callback in list(self.trackers.items()):
            try:
                with activity.own.doing(f"reporting to {name}"):
                    act(name, callback)
            except Exception as error:
                del self.trackers[name]
                self.context.note(f"{name} failed and is disabled: {describe_error(error)}")

    def _open(self, name: str, _: None) -> None:
        """Open the tracker's run, in the run folder or in our project, unless the tracker's own variable, or `--trl
        project=...`, says otherwise. A run of wandb that is open already is used, and left open."""
        folder, args = self.context.folder.path, self.trainer.args
        (made,) = get_reporting_integration_callbacks([name])
        self.trackers[name] = callback = made()
        if name == "tensorboard":  # transformers would put the files among the checkpoints
            callback.logging_dir = callback.logging_dir or str(folder / "tensorboard")
        elif name == "trackio" and args.project == "huggingface":
            args.project = PROJECT
        elif name == "wandb" and (wandb := import_module("wandb")).run is None:
            self._opened.append(name)
            project, place = os.environ.get("WANDB_PROJECT", PROJECT), os.environ.get("WANDB_DIR", folder)
            wandb.init(project=project, name=self.context.config.project_name, dir=str(place))
        configuration = self.trainer.model.config  # which transformers reports
        configuration.aitrain = self._options()
        try:
            callback.on_train_begin(*self._state, model=self.trainer.model)
        finally:
            del configuration.aitrain

    @property
    def _state(self) -> tuple[Any, Any, Any]:
        """Arguments of the methods of callbacks."""
        return self.trainer.args, self.trainer.state, self.trainer.control

    def take(self, scores: Evaluated) -> None:
        """Report scores of the held-out cases."""
        values = {"eval_score": scores.sampled, "eval_greedy": scores.greedy}
        self.on_log(*self._state, {name: value for name, value in values.items() if value is not None})

    def _options(self) -> dict[str, object]:
        """All options, without secrets in the environment's keywords or TRL's fields."""
        options = self.context.config.written()
        options |= without_secrets({"rl_env_config": options["rl_env_config"], "trl": options["trl"]})
        return options

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Report a line of metrics."""
        self._each(lambda _, callback: callback.on_log(args, state, control, logs=dict(logs), **rest))

    def close(self) -> None:
        """Close the trackers, after the last scores."""
        self._each(lambda _, callback: callback.on_train_end(*self._state))
        self._each(lambda name, _: import_module(name).finish() if name in self._opened else None)
