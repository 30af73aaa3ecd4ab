"""Functions and classes of the user's, named `file.py:name` or `package.module:name`: checked, and loaded."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module as import_installed
from pathlib import Path
from typing import Any

from aitrain.environment.user_modules import import_file, import_module, module_specs, names_in, parse
from aitrain.errors import ConfigError, did_you_mean

Place = tuple[str, str]
"""A file or module, and a name in it."""


def parse_id(id: str) -> list[Place]:
    """`rewards.py:exact,short,other.py:clear` as places; a name without a module is one of the module before it."""
    places: list[Place] = []
    for part in id.split(","):
        module, _, name = part.strip().rpartition(":")
        places.append((module or (places[-1][0] if places else ""), name))
    return places


def check_objects(places: Iterable[Place], kind: str) -> None:
    """Check files and names without running anything; `kind` is what the names are, such as `function`.

    Raises:
        ConfigError: a file, a module or a name in it does not exist.
        EnvironmentFailed: a file is not valid Python.
    """
    for module, name in places:
        file = _file_of(module)
        names = names_in(parse(file)) if file else {"*"}
        if {name, "*"}.isdisjoint(names):
            raise ConfigError(f"rl_env: there is no {kind} {name or 'named'} in {module}.{did_you_mean(name, names)}")


def load_object(module: str, name: str) -> Any:
    """Import a module or file, and return what it has under the name.

    Raises:
        ConfigError: the name is not there.
    """
    file = _file_of(module) if module.endswith(".py") else None
    if file is None:
        loaded = import_module(module) if module_specs(module) else import_installed(module)
    else:
        own = f"aitrain_environment_{file.stem}"
        if own in sys.modules and sys.modules[own].__file__ != str(file):  # of the same name, in another folder
            own += "_" + hashlib.sha256(bytes(file)).hexdigest()[:8]
        sys.path += [folder for folder in (str(file.parent),) if folder not in sys.path]
        loaded = sys.modules.get(own) or import_file(own, file)
    if not hasattr(loaded, name):
        raise ConfigError(f"rl_env: there is no {name} in {module}.{did_you_mean(name, vars(loaded))}")
    return getattr(loaded, name)


def source_files(places: Iterable[Place] = (), objects: Iterable[object] = (), framework: str = "") -> list[Path]:
    """The files of these places, then those that define these functions, classes and objects, each once; without those
    of aitrain, of Python and of the framework, whose version says what they are."""
    files = [file for module, _ in places if module and (file := _file_of(module))]
    known = {"aitrain", framework, *sys.stdlib_module_names}
    for one in objects:
        one = one.func if isinstance(one, partial) else one
        defined = inspect.unwrap(one) if callable(one) else one
        kind = defined if inspect.isroutine(defined) or inspect.isclass(defined) else type(defined)
        if kind.__module__.partition(".")[0] not in known:
            with suppress(TypeError, OSError):  # of a notebook, or not written in Python
                files.append(Path(inspect.getfile(kind)).resolve())
    return list(dict.fromkeys(file for file in files if file.is_file()))


def package_files(module: str) -> list[Path]:
    """The file of a module; of a package, all of its modules."""
    file = _file_of(module)
    if file is None or file.name != "__init__.py":
        return [] if file is None else [file]
    return [file, *(other for other in sorted(file.parent.rglob("*.py")) if other != file)]


def _file_of(module: str) -> Path | None:
    """The source file of a file or module; None for a module without source.

    Raises:
        ConfigError: there is none.
    """
    if module.endswith(".py"):
        file = Path(os.path.expanduser(module))
        if not file.is_file():
            near = did_you_mean(file.name, [other.name for other in file.parent.glob("*.py")])
            raise ConfigError(f"rl_env: there is no file {module} (looked from {Path.cwd()}).{near}")
        return file.resolve()
    specs = module_specs(module) if all(part.isidentifier() for part in module.split(".")) else []
    if not specs:
        raise ConfigError(
            f"rl_env: there is no file or module {module or '?'}\nName one: file.py:name, or package.module:name"
        )
    origin = specs[-1].origin or ""
    return Path(origin) if origin.endswith(".py") else None
