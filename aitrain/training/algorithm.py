"""What a run adds to TRL's GRPO: advantages of other algorithms, a penalty in the reward, and a loss and callbacks of
the user's. Formulas on tensors; trainer.py applies them.

Rewards have shape (episodes,), with the members of a group next to each other and NaN for an episode without a score.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import TrainerCallback, TrainerControl

from aitrain.environment.contract import arguments_for
from aitrain.environment.user_modules import load_function
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.execution.user_code import users_errors
from aitrain.options.algorithms import ALGORITHMS, Algorithm
from aitrain.options.train import TrainConfig

Tensor: TypeAlias = torch.Tensor
CustomLoss: TypeAlias = Callable[..., Tensor]
"""Returns the loss of each token, given the mask of the tokens in the loss and the others of LOSS_ARGUMENTS by name."""


@dataclass(frozen=True)
class AlgorithmParts:
    """The parts of a run's algorithm that TRL does not have."""

    config: TrainConfig
    algorithm: Algorithm
    custom_loss: CustomLoss | None

    @classmethod
    def of(cls, config: TrainConfig) -> AlgorithmParts:
        """Those of a run.

        Raises:
            ConfigError: the custom loss asks for an argument that there is not.
            EnvironmentFailed: the module of the custom loss cannot be imported.
        """
        custom = config.custom_loss
        return cls(config, ALGORITHMS[config.rl_loss_type], load_loss(custom) if custom else None)

    def penalty(self, tokens: int) -> float:
        """The soft overlong punishment of DAPO for a completion of this length: it grows from 0 where the buffer begins
        to 1 at the limit."""
        limit, buffer = self.config.completion_tokens, self.config.overlong_buffer
        return 0.0 if buffer is None else min(max((tokens - limit + buffer) / buffer, 0.0), 1.0)

    def advantages(self, rewards: Tensor, size: int, of_trl: Tensor, own: slice) -> Tensor:
        """The advantages of this process's episodes, which are `own` among those of `rewards`: those of the algorithm,
        or else those that TRL has computed. Equal rewards have none: TRL's are the rounding of their mean, with which
        Adam would make whole steps."""
        made = self.algorithm.advantages(rewards, size)
        differs = has_advantages(rewards, ~rewards.isnan(), size).repeat_interleave(size)[own]
        return of_trl * differs if made is None else made[own].nan_to_num(0.0)


def has_advantages(scores: torch.Tensor, kept: torch.Tensor, size: int) -> torch.Tensor:
    """Whether each group has a nonzero advantage among the episodes in the loss.

    `scores` and `kept` have shape (episodes,), with the members of a group next to each other; NaN means unscored.
    """
    groups, kept = scores.view(-1, size), kept.bool().view(-1, size)
    low = groups.nan_to_num(nan=math.inf).amin(1, keepdim=True)
    spread = groups.nan_to_num(nan=-math.inf).amax(1, keepdim=True) - low
    distance = (groups - groups.nanmean(1, keepdim=True)).abs()
    # by rounding, equal scores differ from their mean, and so does one that is the mean of the others
    return (kept & (spread > 0) & (distance > 1e-3 * spread)).any(1)


# -- functions of the user's

LOSS_ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "mask", "ref_logprobs", "entropies")
"""What a custom loss may ask for by name."""


def load_loss(place: str) -> CustomLoss:
    """The user's function that --custom-loss names, which returns the loss of each token; here 0 where the mask is.

    Raises:
        ConfigError: it cannot be found, or asks for what there is not.
        EnvironmentFailed: importing it raised. Its call: it raised, or returned something else.
    """
    function = load_function("custom_loss", place)
    try:
        inspect.signature(function).bind(**arguments_for(function, dict.fromkeys(LOSS_ARGUMENTS)))
    except TypeError as error:
        raise ConfigError(f"custom_loss: {error}\nIt may ask for: {', '.join(LOSS_ARGUMENTS)}") from error

    def token_losses(mask: Tensor, **others: Tensor | None) -> Tensor:
        losses = _call_user("custom_loss", function, **arguments_for(function, {"mask": mask, **others}))
        rows, tokens = mask.shape
        if not isinstance(losses, Tensor) or losses.shape not in ((rows, tokens), (rows, 1)):
            raise EnvironmentFailed(
                f"custom_loss: must return the loss of each token, a tensor of {(rows, tokens)} here\n"
                "aitrain takes the mean over the tokens of a step."
            )
        return losses.expand(rows, tokens).masked_fill(mask == 0, 0.0)

    return token_losses


def custom_callbacks(config: TrainConfig, end_run: Callable[[str], None]) -> list[TrainerCallback]:
    """The callbacks of a run, in the order of the option, each made by a call without arguments. One that stops the
    training calls `end_run`, so that all ranks stop after the same step, with a checkpoint.

    Raises:
        ConfigError: one of them cannot be found, or is no callback.
        EnvironmentFailed: its module cannot be imported, or the call raised.
    """
    made = list[TrainerCallback]()
    for place in filter(None, (config.custom_callbacks or "").split(",")):
        callback = _call_user(f"custom_callbacks: {place}", load_function("custom_callbacks", place))
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(
                f"custom_callbacks: {place} gives {type(callback).__name__}, not a transformers.TrainerCallback\n"
                "Name a class of callbacks, or a function without arguments that returns one."
            )
        for event in [name for name in dir(type(callback)) if name.startswith("on_")]:
            heard = partial(_call_user, f"custom_callbacks: {place}, {event}", getattr(callback, event))
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


def _call_user(what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The user's function, whose errors name it and the line of the user's code."""
    with users_errors(f"{what} raised"):
        return function(*arguments, **keywords)
