"""aitrain: fine-tune a language model with GRPO on a task of your own.

The public names are imported on first use, so that `import aitrain` needs no pydantic; type checkers read __init__.pyi.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_MODULES = {
    "AitrainError": "errors",
    "ConfigError": "errors",
    "EnvRequirements": "environment.requirements",
    "EnvironmentFailed": "errors",
    "EpisodeTruncated": "errors",
    "Interrupted": "errors",
    "Result": "runs.result",
    "RunFailed": "errors",
    "Score": "environment.contract",
    "ToolCall": "environment.completion_parser",
    "ToolResult": "environment.contract",
    "TrainConfig": "options.train",
    "chat": "notebook",
    "compare": "notebook",
    "train": "notebook",
}
"""The module of each name."""
__all__ = ["judges", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "judges":
        return import_module("aitrain.judges")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"aitrain.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
