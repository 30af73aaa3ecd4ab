"""aitrain: fine-tune a language model with GRPO on a task of your own."""

from __future__ import annotations

from typing import Any

from aitrain.config import TrainConfig
from aitrain.environment.contract import Score
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed, Interrupted, RunFailed
from aitrain.run_folder import Result

__version__ = "0.1.0"
__all__ = [
    "AitrainError",
    "ConfigError",
    "EnvironmentFailed",
    "Interrupted",
    "Result",
    "RunFailed",
    "Score",
    "TrainConfig",
    "train",
]


def train(config: TrainConfig, environment: Any = None) -> Result:
    """Train in this process, as in a notebook; `environment` may be an object of a class defined there.

    Raises:
        ConfigError: a knob or the model is wrong.
        EnvironmentFailed: the environment cannot be used.
        RunFailed: training failed.
        Interrupted: it was stopped before the first step.
    """
    from aitrain.notebook import train_here

    return train_here(config, environment)
