"""Imports and constructs the user's environment, in the training process and before a model is loaded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

from aitrain.environment.adapters import SERVED
from aitrain.environment.adapters.random_stream import RandomStream
from aitrain.environment.locator import EnvSource, check_signature, no_such_class, several_classes
from aitrain.environment.user_modules import add_to_path, import_file, import_module
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.execution.user_code import failure_message


def load_env(source: EnvSource, keywords: Mapping[str, object]) -> object:
    """Import and construct the environment.

    Raises:
        ConfigError: the class is missing, or its constructor does not take a keyword.
        EnvironmentFailed: the module or the constructor raised; the message has the line in the user's code.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no `__pycache__` in the user's folder
    try:
        module = _import(source)
        name = source.class_name or _only_class(source, module)
        if not hasattr(module, name):
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            raise ConfigError(no_such_class(source, name, classes))
        if source.adapter is not None:
            factory = partial(getattr(module, name), source.id)
            with RandomStream(0).active():  # importing a framework may draw random numbers, or seed them
                return _named(_construct(factory, f"the adapter {source.adapter.name}", keywords), source)
        return _construct(getattr(module, name), name, keywords)
    finally:
        sys.dont_write_bytecode = before


def _named(environment: object, source: EnvSource) -> object:
    """An adapter's environment, with a class of its own: it has the user's name, and not the adapter's source."""
    kind, adapter = type(environment), source.adapter
    if adapter is None or adapter is SERVED:  # which has the name that the server gives it
        return environment
    package = adapter.package or (None if getattr(environment, "source_files", ()) else "aitrain")  # whose rules it has
    members = {"__module__": kind.__module__, "source_files": (), "source_package": None if adapter.by_url else package}
    environment.__class__ = type(source.shown_name, (kind,), members)
    return environment


def _import(source: EnvSource) -> ModuleType:
    """Import the module; its folder is searched as well."""
    add_to_path(Path.cwd() if source.is_module or source.file is None else source.file.parent)
    try:
        if source.is_module or source.file is None:
            return import_module(source.module)
        return import_file(source.module, source.file)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message("The environment's module cannot be imported", error)) from error


def _only_class(source: EnvSource, module: ModuleType) -> str:
    public = {name: value for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"}
    own = (name for name, value in public.items() if value.__module__ == module.__name__)
    found = [name for name in own if hasattr(public[name], "build_dataset")]
    place = str(source.file or source.module)
    if len(found) > 1:
        raise ConfigError(several_classes(place, found))
    if not found:
        raise ConfigError(f"rl_env_class: no class in {place} has build_dataset\nName one with --rl-env-class.")
    return found[0]


def _construct(factory: Callable[..., object], name: str, keywords: Mapping[str, object]) -> object:
    if not callable(factory):
        raise ConfigError(f"rl_env_class: {name} is not a class, but {factory!r}")
    check_signature(factory, name, keywords)
    try:
        return factory(**keywords)
    except (ConfigError, EnvironmentFailed):
        raise  # an adapter's, about its settings or its server
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}=..." for key in keywords)
        raise EnvironmentFailed(failure_message(f"{name}({given}) raised", error)) from error
