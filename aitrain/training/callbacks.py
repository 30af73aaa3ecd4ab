"""The user's own callbacks of the trainer (`--custom-callbacks`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl

from aitrain.environment.user_modules import load_function
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.execution.user_code import failure_message
from aitrain.options.train import TrainConfig


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
