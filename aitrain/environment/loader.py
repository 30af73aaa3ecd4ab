"""Finds and constructs environments, in the training process and before a model is loaded."""

import inspect
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from aitrain.environment.adapters import ADAPTERS, SERVED, Adapter, adapter_named
from aitrain.environment.user_modules import (
    check_signature,
    file_of,
    import_file,
    import_module,
    member,
    module_specs,
    no_bytecode,
)
from aitrain.errors import ConfigError, errors_of
from aitrain.execution.user_code import users_errors
from aitrain.options.train import TrainConfig
from aitrain.packages import BUNDLED
from aitrain.redaction import redact

FOLDER = re.compile(r"[^,]*/(?=[^/,]+\.(?:py|jsonl?|csv|parquet)(?:[@:,]|$))")
"""The folder of a file in an adapter's id."""


@dataclass(frozen=True)
class EnvSource:
    """Location of an environment."""

    place: str
    """The file or module."""
    file: Path | None
    class_name: str | None
    adapter: Adapter | None = None
    id: str = ""
    """What follows the adapter's name; the first argument of its class."""


def find_env(config: TrainConfig) -> EnvSource:
    """Locate the environment without running the user's code.

    Raises:
        ConfigError: none is given, or the module or file does not exist.
    """
    if isinstance(config.rl_env, list):
        raise ConfigError(f"rl_env: this takes one environment, not {len(config.rl_env)}: name one with --rl-env")
    option, place, class_name = "rl_env_module", config.rl_env_module, config.rl_env_class
    if place is None:
        option = "rl_env"
        place, _, class_name = config.env_place.partition(":")
        if place in ("http", "https") and class_name.startswith("/"):
            return _adapter_source(SERVED, config.env_place)
        if (adapter := adapter_named(place)) is not None:
            return _adapter_source(adapter, class_name)
    if not place:
        raise ConfigError(
            "rl_env: no environment is given. Name yours with --rl-env path/to/file.py:Class, or with --rl-env-module"
            f" and --rl-env-class.\nBundled ones to try: {', '.join(bundled_modules())}"
        )
    if place in bundled_modules() and not module_specs(place):
        place = f"aitrain.{place}"
    return EnvSource(place, file_of(place, option, [*bundled_modules(), *ADAPTERS]), class_name or None)


def locate_environments(config: TrainConfig) -> dict[str, EnvSource]:
    """Locate each environment of the options by its name.

    Raises:
        ConfigError: none is given, or one does not exist.
    """
    sources = dict[str, EnvSource]()
    for name, own in config.environments.items():
        with errors_of(name):
            sources[name] = find_env(own)
    return sources


def _adapter_source(adapter: Adapter, id: str) -> EnvSource:
    if not id:
        example = f"--rl-env {adapter.name}:{adapter.example}"
        raise ConfigError(f"rl_env: {adapter.name} needs what it is to load, as in {example}")
    return EnvSource(adapter.module, file_of(adapter.module), adapter.class_name, adapter, id)


def bundled_modules() -> list[str]:
    """Names of the example environments that come with aitrain."""
    return [f"envs.{file.stem}" for file in sorted(BUNDLED.glob("*.py"))]


def load_env(config: TrainConfig) -> object:
    """Import and construct the only environment of the options.

    Raises:
        ConfigError: the module, file or class is missing, or its constructor does not take a keyword; or an adapter's
            package is missing.
        EnvironmentFailed: the module or the constructor raised; the message has the line in the user's code.
    """
    source, keywords = find_env(config), config.rl_env_config
    adapter, file = source.adapter, source.file
    if adapter is not None:
        adapter.require_package()
    with no_bytecode():
        with users_errors("The environment's module cannot be imported"):
            is_file = source.place.endswith(".py")
            module = import_file(file) if is_file and file else import_module(source.place)
        name = source.class_name or _only_class(source, module)
        factory = member(module, name, "rl_env_class")
        if adapter is not None:
            factory, name = partial(factory, source.id), f"the adapter {adapter.name}"
        check_signature(factory, name, keywords)
        with users_errors(f"{name} raised"):
            environment: object = factory(**keywords)
    if adapter is None or adapter is SERVED:  # which has the name that the server gives it
        return environment
    # an adapter's environment gets a class of its own: it has the user's name, without folders, and not our source
    kind = type(environment)
    package = adapter.package or (None if getattr(environment, "source_files", ()) else "aitrain")  # whose rules it has
    members = {"__module__": kind.__module__, "source_files": (), "source_package": None if adapter.by_url else package}
    name = f"{adapter.name}:{FOLDER.sub('', redact(source.id))}"
    environment.__class__ = type(name, (kind,), members)
    return environment


def _only_class(source: EnvSource, module: ModuleType) -> str:
    classes = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    found = [name for name, kind in classes.items() if hasattr(kind, "build_dataset")]
    if len(found) != 1:
        place = source.file or source.place
        raise ConfigError(
            f"rl_env_class: {getattr(module, '__file__', place)} has {len(found)} classes with build_dataset"
            f" (classes there: {', '.join(classes) or 'none'}).\n"
            f"Name one, also one that is imported there, as in --rl-env {place}:{(found or ['MyEnv'])[-1]}"
        )
    return found[0]
