"""aitrain: fine-tune a language model with GRPO on a task of your own.

The public names are imported on first use, so that `import aitrain` needs no pydantic; type checkers read __init__.pyi.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_NAMES = {
    "environment.contract": ("Score", "ToolResult"),
    "environment.requirements": ("EnvRequirements",),
    "environment.completion_parser": ("ToolCall",),
    "errors": ("AitrainError", "ConfigError", "EnvironmentFailed", "EpisodeTruncated", "Interrupted", "RunFailed"),
    "notebook": ("chat", "compare", "train"),
    "options.train": ("TrainConfig",),
    "runs.result": ("Result",),
}
"""By the module that has them."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
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
