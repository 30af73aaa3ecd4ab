"""The environments that can be named with --rl-env: bundled, installed, and through adapters; none is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from aitrain.environment.adapters import ADAPTERS, Adapter
from aitrain.errors import ConfigError
from aitrain.packages import BUNDLED

ENTRY_POINTS = "aitrain.environments"
"""Group of entry points by which an installed package lists its environments: NAME = "package.module:Class"."""


@dataclass(frozen=True)
class ListedEnvironment:
    """One line of the list."""

    source: str
    """bundled, installed or adapter."""
    rl_env: str
    """What to give with --rl-env; an example for an adapter."""
    summary: str
    package: str | None = None
    """The package that it needs or comes from; None if it needs none."""
    version: str | None = None
    """Version of the installed package; None if it is not installed."""
    problem: str = ""
    """Why the package cannot be used, with the command that installs it."""


def listed_environments() -> list[ListedEnvironment]:
    """Bundled environments, those of installed packages, and adapters."""
    return [*_bundled(), *_installed(), *map(_adapter, ADAPTERS.values())]


def _bundled() -> list[ListedEnvironment]:
    return [ListedEnvironment("bundled", f"envs.{file.stem}", _summary(file)) for file in sorted(BUNDLED.glob("*.py"))]


def _summary(file: Path) -> str:
    """First paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _installed() -> list[ListedEnvironment]:
    return [
        ListedEnvironment(
            "installed",
            entry.value,
            entry.name,
            None if entry.dist is None else entry.dist.name,
            None if entry.dist is None else entry.dist.version,
        )
        for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.value, entry.name))
    ]


def _adapter(adapter: Adapter) -> ListedEnvironment:
    try:
        adapter.require_package()
        problem = ""
    except ConfigError as error:
        problem = str(error).removeprefix("rl_env: ")
    return ListedEnvironment(
        "adapter",
        f"{adapter.name}:{adapter.example}",
        adapter.summary,
        adapter.package,
        adapter.installed_version,
        problem,
    )
