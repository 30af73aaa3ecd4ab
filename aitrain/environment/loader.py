"""Imports and constructs the user's environment, in the training process and before a model is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from aitrain.environment.locator import EnvSource, module_specs, no_such_class, refuse_keywords, several_classes
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
        return _construct(getattr(module, name), name, keywords)
    finally:
        sys.dont_write_bytecode = before


def _import(source: EnvSource) -> ModuleType:
    """Import the module with its folder at the end of sys.path, so that it does not hide a library of the same name."""
    own = Path.cwd() if source.is_module or source.file is None else source.file.parent
    sys.path += [folder for folder in dict.fromkeys((str(own), str(Path.cwd()))) if folder not in sys.path]
    try:
        if source.is_module:
            if source.module.partition(".")[0] not in sys.modules:
                _execute(module_specs(source.module)[0])
            return importlib.import_module(source.module)
        spec = importlib.util.spec_from_file_location(source.module, source.file)
        assert spec is not None  # a file that ends in .py always has a loader
        return _execute(spec)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message("The environment's module cannot be imported", error)) from error


def _execute(spec: ModuleSpec) -> ModuleType:
    """Execute a module; it is registered first, as dataclasses and pickle look modules up by name."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module


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
    with suppress(TypeError, ValueError):  # no signature available: the call itself will show
        parameters = list(inspect.signature(factory).parameters.values())
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
            refuse_keywords(name, keywords, ([p.name for p in named], [p.name for p in named if p.default is p.empty]))
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}=..." for key in keywords)
        raise EnvironmentFailed(failure_message(f"{name}({given}) raised", error)) from error
