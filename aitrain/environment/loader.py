"""Imports and constructs the user's environment, in the training process and before a model is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    with _no_bytecode():
        module = _import(source)
        name = source.class_name or _only_class(source, module)
        if not hasattr(module, name):
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            raise ConfigError(no_such_class(source, name, classes))
        return _construct(getattr(module, name), name, keywords)


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Do not write `__pycache__` to the user's folder."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _import(source: EnvSource) -> ModuleType:
    _allow_sibling_imports(source)
    try:
        return _import_module(source.module) if source.is_module else _import_file(source)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message("The environment's module cannot be imported", error)) from error


def _allow_sibling_imports(source: EnvSource) -> None:
    """Append the folder to sys.path; at its end, so that a folder named like a library does not hide it."""
    own = Path.cwd() if source.is_module or source.file is None else source.file.parent
    for folder in (str(own), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)


def _import_module(name: str) -> ModuleType:
    if name.partition(".")[0] not in sys.modules:
        _execute(module_specs(name)[0])
    return importlib.import_module(name)


def _import_file(source: EnvSource) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    assert spec is not None  # a file that ends in .py always has a loader
    return _execute(spec)


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
    found = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "build_dataset")
    ]
    found = [name for name in found if not name.startswith("_")]
    place = str(source.file or source.module)
    if len(found) > 1:
        raise ConfigError(several_classes(place, found))
    if not found:
        raise ConfigError(f"rl_env_class: no class in {place} has build_dataset\nName one with --rl-env-class.")
    return found[0]


def _construct(factory: Callable[..., object], name: str, keywords: Mapping[str, object]) -> object:
    if not callable(factory):
        raise ConfigError(f"rl_env_class: {name} is not a class, but {factory!r}")
    _check_signature(factory, name, keywords)
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}=..." for key in keywords)
        raise EnvironmentFailed(failure_message(f"{name}({given}) raised", error)) from error


def _check_signature(factory: Callable[..., object], name: str, keywords: Mapping[str, object]) -> None:
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return  # no signature available: the call itself will show
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    refuse_keywords(name, keywords, ([p.name for p in named], [p.name for p in named if p.default is p.empty]))
