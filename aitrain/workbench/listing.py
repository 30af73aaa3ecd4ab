"""The environments that can be named with --rl-env: bundled, installed, and through adapters; none is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import entry_points

from aitrain.environment.adapters import ADAPTERS
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
    found = list[ListedEnvironment]()
    for file in sorted(BUNDLED.glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        found.append(ListedEnvironment("bundled", f"envs.{file.stem}", " ".join(text.partition("\n\n")[0].split())))
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.value, entry.name)):
        package, version = (None, None) if entry.dist is None else (entry.dist.name, entry.dist.version)
        found.append(ListedEnvironment("installed", entry.value, entry.name, package, version))
    for adapter in ADAPTERS.values():
        problem, rl_env = "", f"{adapter.name}:{adapter.example}"
        try:
            adapter.require_package()
        except ConfigError as error:
            problem = str(error).removeprefix("rl_env: ")
        package, version = adapter.package, adapter.installed_version
        found.append(ListedEnvironment("adapter", rl_env, adapter.summary, package, version, problem))
    return found
