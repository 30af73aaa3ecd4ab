"""aitrain: fine-tune a language model with GRPO on a task of your own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed, EpisodeTruncated, Interrupted, RunFailed

if TYPE_CHECKING:
    from pathlib import Path

    from aitrain import judges
    from aitrain.environment.contract import (
        Environment,
        EpisodeGenerator,
        EpisodeObject,
        Score,
        ScoreValue,
        SpeakingFirst,
        ToolResult,
    )
    from aitrain.environment.requirements import EnvRequirements
    from aitrain.environment.tool_call_parser import ToolCall
    from aitrain.notebook import Chat
    from aitrain.options.train import TrainConfig
    from aitrain.runs.result import Result

__version__ = "0.1.0"
__all__ = [
    "AitrainError",
    "ConfigError",
    "EnvRequirements",
    "Environment",
    "EnvironmentFailed",
    "EpisodeGenerator",
    "EpisodeObject",
    "EpisodeTruncated",
    "Interrupted",
    "Result",
    "RunFailed",
    "Score",
    "ScoreValue",
    "SpeakingFirst",
    "ToolCall",
    "ToolResult",
    "TrainConfig",
    "chat",
    "judges",
    "train",
]

_LAZY = {
    "EnvRequirements": "aitrain.environment.requirements",
    "Environment": "aitrain.environment.contract",
    "EpisodeGenerator": "aitrain.environment.contract",
    "EpisodeObject": "aitrain.environment.contract",
    "Result": "aitrain.runs.result",
    "Score": "aitrain.environment.contract",
    "ScoreValue": "aitrain.environment.contract",
    "SpeakingFirst": "aitrain.environment.contract",
    "ToolCall": "aitrain.environment.tool_call_parser",
    "ToolResult": "aitrain.environment.contract",
    "TrainConfig": "aitrain.options.train",
}
"""Names that are imported on first use, by module: `import aitrain` needs no pydantic."""


def __getattr__(name: str) -> Any:
    if name == "judges":
        return import_module("aitrain.judges")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def train(config: TrainConfig | None = None, environment: Any = None, **options: Any) -> Result:
    """Train in this process, as in a notebook; `environment` may be an object of a class defined there.

    `options` are those of TrainConfig, in place of a `config`: `aitrain.train(model="tiny", environment=Sums())`.

    Raises:
        ConfigError: an option or the model is wrong.
        EnvironmentFailed: the environment cannot be used.
        RunFailed: training failed.
        Interrupted: it was stopped before the first step.
    """
    from aitrain.notebook import train_here

    return train_here(config, environment, options)


def chat(model: str | Path, *questions: str, **options: Any) -> Chat:
    """Talk to a trained model and its base in this process, as in a notebook: `aitrain.chat("runs/sums")("2 + 2 = ?")`.

    `options` are those of `aitrain chat`: `only`, `system`, `greedy`, `seed`, and the environment's and the sampling
    options of a run; `environment` may be an object, as for `train`.

    Raises:
        ConfigError: the model cannot be loaded, or an option is wrong.
    """
    from aitrain.notebook import chat_here

    if questions:
        raise ConfigError(f"chat: this loads the models; ask what it returns: chat(...)({questions[0]!r})")
    return chat_here(str(model), **options)
