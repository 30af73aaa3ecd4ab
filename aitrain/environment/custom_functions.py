"""Functions of the user's that an option names as module:function or file.py:function: checked without running their
code, and loaded. A file that is imported already, such as the environment's, is not imported a second time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aitrain.environment.user_modules import add_to_path, import_file, import_module, module_specs, names_in, parse
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.execution.user_code import failure_message
from aitrain.missing_file import no_file

FUNCTION_OPTIONS = ("custom_loss", "custom_sampler", "custom_callbacks")
"""The options that name functions; one may name several, with commas."""


def function_file(option: str, place: str) -> Path | None:
    """The file of a function, with the function in it; None for a module that is not written in Python. Nothing is
    imported.

    Raises:
        ConfigError: there is no such file, module or function.
        EnvironmentFailed: the file is not valid Python.
    """
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        file = Path(os.path.expanduser(where)).absolute()
        if not file.is_file():
            raise ConfigError(f"{option}: {no_file(where)}")
    else:
        is_name = all(part.isidentifier() for part in where.split("."))
        chain = module_specs(where) if is_name else []
        if not chain or chain[-1].origin is None:
            raise ConfigError(
                f"{option}: there is no module {where} (looked in {Path.cwd()} and among the installed packages).\n"
                "A file is named as path/to/file.py:function."
            )
        if not chain[-1].origin.endswith(".py"):
            return None
        file = Path(chain[-1].origin)
    names = names_in(parse(file))
    if name not in names and "*" not in names and "__getattr__" not in names:
        raise ConfigError(f"{option}: there is no {name} in {file}.{did_you_mean(name, names)}")
    return file


def load_function(option: str, place: str) -> Callable[..., Any]:
    """Import a module or file, and return its function.

    Raises:
        ConfigError: there is no such file, module or function, or it cannot be called.
        EnvironmentFailed: importing it raised; the message has the line in the user's code.
    """
    where, _, name = place.rpartition(":")
    file = function_file(option, place)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no `__pycache__` in the user's folder
    add_to_path(file.parent if file is not None and where.endswith(".py") else Path.cwd())
    try:
        module = import_module(where) if file is None or not where.endswith(".py") else _module_of(file)
        found = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(f"{option}: {where} cannot be imported", error)) from error
    finally:
        sys.dont_write_bytecode = before
    if not callable(found):
        raise ConfigError(f"{option}: {name} in {where} is not a function")
    return found  # type: ignore[no-any-return]


def _module_of(file: Path) -> Any:
    """The module of a file, imported once."""
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if origin is not None and Path(origin) == file.resolve():
            return module
    name = f"aitrain_custom_{file.stem}"
    while name in sys.modules:
        name += "_"
    return import_file(name, file.resolve())
