"""The trainer's callbacks that a user names with --custom-callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.environment.custom_functions import load_function
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
    places = (config.custom_callbacks or "").split(",") if config.custom_callbacks else []
    return [_made(place, end_run) for place in places]


def _made(place: str, end_run: Callable[[str], None]) -> TrainerCallback:
    make = load_function("custom_callbacks", place)
    callback = _call(place, make)
    if not isinstance(callback, TrainerCallback):
        raise ConfigError(
            f"custom_callbacks: {place} gives {type(callback).__name__}, not a transformers.TrainerCallback\n"
            "Name a class of callbacks, or a function without arguments that returns one."
        )
    for event in [name for name in dir(type(callback)) if name.startswith("on_")]:
        heard = partial(_call, f"{place}, {event}", getattr(callback, event))
        setattr(callback, event, partial(_heard, heard, partial(end_run, f"{place} stopped the training")))
    return callback


def _heard(
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


def _call(place: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The user's function, whose errors name it and the line of the user's code."""
    try:
        return function(*arguments, **keywords)
    except AitrainError:
        raise
    except Exception as error:
        raise EnvironmentFailed(failure_message(f"custom_callbacks: {place} raised", error)) from error
