"""Finds and constructs environments, in the training process and before a model is loaded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from aitrain.environment.adapters import ADAPTERS, SERVED, Adapter, adapter_named
from aitrain.environment.user_modules import (
    add_to_path,
    check_signature,
    file_of,
    import_file,
    import_module,
    member,
    module_specs,
    no_bytecode,
)
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean, errors_of
from aitrain.execution.user_code import failure_message
from aitrain.options.train import TrainConfig
from aitrain.packages import BUNDLED, PACKAGE
from aitrain.redaction import redact

FOLDER = re.compile(r"[^,]*/(?=[^/,]+\.(?:py|jsonl?|csv|parquet)(?:[@:,]|$))")
"""The folder of a file in an adapter's id."""


@dataclass(frozen=True)
class EnvSource:
    """Location of an environment."""

    module: str
    file: Path | None
    class_name: str | None
    is_module: bool
    """Whether it was given as a module instead of a file."""
    adapter: Adapter | None = None
    id: str = ""
    """What follows the adapter's name; the first argument of its class."""

    @property
    def shown_name(self) -> str:
        """An adapter's environment as the user names it, without the folders of files."""
        assert self.adapter is not None
        return f"{self.adapter.name}:{FOLDER.sub('', redact(self.id))}"


def find_env(config: TrainConfig) -> EnvSource:
    """Locate the environment without running the user's code.

    Raises:
        ConfigError: none is given, or the module or file does not exist.
    """
    if isinstance(config.rl_env, list):
        raise ConfigError(f"rl_env: this takes one environment, not {len(config.rl_env)}: name one with --rl-env")
    if config.rl_env_module is not None:
        return _find_module("rl_env_module", config.rl_env_module, config.rl_env_class)
    place, _, class_name = config.env_place.partition(":")
    if not place:
        raise ConfigError(
            "rl_env: no environment is given. Name yours with --rl-env path/to/file.py:Class, or with --rl-env-module"
            f" and --rl-env-class.\nBundled ones to try: {', '.join(bundled_modules())}"
        )
    if place in ("http", "https") and class_name.startswith("/"):
        return _adapter_source(SERVED, config.env_place)
    adapter = adapter_named(place)
    if adapter is not None:
        return _adapter_source(adapter, class_name)
    file = file_of(place) if place.endswith(".py") else None
    if file is None:
        return _find_module("rl_env", place, class_name or None)
    return EnvSource(f"aitrain_environment_{file.stem}", file, class_name or None, is_module=False)


def locate_environments(config: TrainConfig) -> dict[str, EnvSource]:
    """Locate each environment of the options by its name. Each file becomes a module of its own, as several may have
    the same name.

    Raises:
        ConfigError: none is given, or one does not exist.
    """
    sources = dict[str, EnvSource]()
    for number, (name, own) in enumerate(config.environments.items()):
        with errors_of(name):
            source = find_env(own)
        is_first = source.is_module or not number
        sources[name] = source if is_first else replace(source, module=f"{source.module}_{number}")
    return sources


def _adapter_source(adapter: Adapter, id: str) -> EnvSource:
    if not id:
        example = f"--rl-env {adapter.name}:{adapter.example}"
        raise ConfigError(f"rl_env: {adapter.name} needs what it is to load, as in {example}")
    file = PACKAGE.parent.joinpath(*adapter.module.split(".")).with_suffix(".py")
    return EnvSource(adapter.module, file, adapter.class_name, True, adapter, id)


def bundled_modules() -> list[str]:
    """Names of the example environments that come with aitrain."""
    return [f"envs.{file.stem}" for file in sorted(BUNDLED.glob("*.py"))]


def _find_module(option: str, module: str, class_name: str | None) -> EnvSource:
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ConfigError(
            f"{option}: {module} is not the name of a module, like package.module.{did_you_mean(module, ADAPTERS)}\n"
            "A file is named with --rl-env path/to/file.py:Class"
        )
    chain = module_specs(module)
    if chain:
        readable = (chain[-1].origin or "").endswith(".py")
        return EnvSource(module, Path(str(chain[-1].origin)) if readable else None, class_name, is_module=True)
    if module in bundled_modules():
        file = BUNDLED / f"{module.removeprefix('envs.')}.py"
        return EnvSource(f"aitrain.{module}", file, class_name, is_module=False)
    here, bundled = Path.cwd(), bundled_modules()
    files = [*here.glob("*.py"), *here.glob("*/*.py")]
    modules = [".".join(file.relative_to(here).with_suffix("").parts) for file in files]
    raise ConfigError(
        f"{option}: there is no module {module} (looked in {here} and among the installed packages)."
        f"{did_you_mean(module, [*modules, *bundled, *ADAPTERS])}\nBundled ones: {', '.join(bundled)}"
    )


def load_env(source: EnvSource, keywords: Mapping[str, object]) -> object:
    """Import and construct the environment.

    Raises:
        ConfigError: the class is missing, or its constructor does not take a keyword; or an adapter's package is
            missing.
        EnvironmentFailed: the module or the constructor raised; the message has the line in the user's code.
    """
    adapter, file = source.adapter, None if source.is_module else source.file
    if adapter is not None:
        adapter.require_package()
    add_to_path(Path.cwd() if file is None else file.parent)
    with no_bytecode():
        try:
            module = import_module(source.module) if file is None else import_file(source.module, file)
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(failure_message("The environment's module cannot be imported", error)) from error
        name = source.class_name or _only_class(source, module)
        factory = member(module, name, "rl_env_class")
        if not callable(factory):
            raise ConfigError(f"rl_env_class: {name} is not a class, but {factory!r}")
        if adapter is not None:
            factory, name = partial(factory, source.id), f"the adapter {adapter.name}"
        check_signature(factory, name, keywords)
        try:
            environment: object = factory(**keywords)
        except (ConfigError, EnvironmentFailed):
            raise  # an adapter's, about its settings or its server
        except (Exception, SystemExit) as error:
            given = ", ".join(f"{key}=..." for key in keywords)
            raise EnvironmentFailed(failure_message(f"{name}({given}) raised", error)) from error
    if adapter is None or adapter is SERVED:  # which has the name that the server gives it
        return environment
    # an adapter's environment gets a class of its own: it has the user's name, and not the adapter's source
    kind = type(environment)
    package = adapter.package or (None if getattr(environment, "source_files", ()) else "aitrain")  # whose rules it has
    members = {"__module__": kind.__module__, "source_files": (), "source_package": None if adapter.by_url else package}
    environment.__class__ = type(source.shown_name, (kind,), members)
    return environment


def _only_class(source: EnvSource, module: ModuleType) -> str:
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    classes = [name for name, value in own.items() if inspect.isclass(value) and not name.startswith("_")]
    found = [name for name in classes if hasattr(own[name], "build_dataset")]
    if len(found) != 1:
        place = source.file or source.module
        raise ConfigError(
            f"rl_env_class: {getattr(module, '__file__', place)} has {len(found)} classes with build_dataset"
            f" (classes there: {', '.join(classes) or 'none'}).\n"
            f"Name one, also one that is imported there, as in --rl-env {place}:{(found or ['MyEnv'])[-1]}"
        )
    return found[0]
