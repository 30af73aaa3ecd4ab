"""aitrain: fine-tune a language model with GRPO on a task of your own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed, EpisodeTruncated, Interrupted, RunFailed

if TYPE_CHECKING:
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
    from aitrain.notebook import chat, train
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
    "chat": "aitrain.notebook",
    "train": "aitrain.notebook",
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
