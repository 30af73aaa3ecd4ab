"""Modules, files, functions and classes of the user's: found and parsed without running them, and imported."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from aitrain.errors import ConfigError, did_you_mean, no_file
from aitrain.execution.user_code import users_errors
from aitrain.packages import in_working_directory, installed

Place = tuple[str, str]
"""A file or module, and a name in it."""

_imported = dict[tuple[Path, float], str]()
"""Names of the modules that files were imported as, by the file and the time when it was changed last."""


def module_specs(module: str) -> list[ModuleSpec]:
    """Import specs of a module's parent packages and the module, found without importing any.

    The working directory comes first, so that an installed package called `tests` does not hide the user's.
    """
    top, *rest = module.split(".")
    chains = [_down(spec, rest) for spec in (in_working_directory(top), installed(top)) if spec is not None]
    return min(filter(None, chains), key=lambda chain: chain[-1].origin is None, default=[])


def _down(spec: ModuleSpec, names: list[str]) -> list[ModuleSpec]:
    """The specs from a top-level module down to the last of the names; none if one is not there."""
    chain = [spec]
    for name in names:
        below = PathFinder.find_spec(f"{chain[-1].name}.{name}", list(chain[-1].submodule_search_locations or []))
        if below is None:
            return []
        chain.append(below)
    return chain


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


def import_file(file: Path) -> ModuleType:
    """Import a file as a module of a name of its own, also if a file of another folder, or an earlier state of it, was
    imported before."""
    _add_to_path(file.parent)
    name = f"aitrain_environment_{file.stem}"
    while name in sys.modules:
        name += "_"
    _imported[file, file.stat().st_mtime] = name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # a file that ends in .py always has a loader
    return _execute(spec)


def import_module(name: str) -> ModuleType:
    """Import a module; the working directory comes first."""
    _add_to_path()
    specs = module_specs(name)
    if specs and name.partition(".")[0] not in sys.modules:
        _execute(specs[0])
    return importlib.import_module(name)


def _add_to_path(*folders: Path) -> None:
    """Let imports find modules of these folders and of the working directory. They are appended to `sys.path`, so that
    they do not hide libraries of the same name."""
    sys.path += [place for place in map(str, (*folders, Path.cwd())) if place not in sys.path]


@contextmanager
def no_bytecode() -> Iterator[None]:
    """Context in which imports write no `__pycache__` into the user's folder."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


# -- functions and classes in them


def parse_id(id: str) -> list[Place]:
    """`rewards.py:exact,short,other.py:clear` as places; a name without a module is one of the module before it."""
    places: list[Place] = []
    for part in id.split(","):
        module, _, name = part.strip().rpartition(":")
        places.append((module or (places[-1][0] if places else ""), name))
    return places


def member(module: ModuleType, name: str, option: str) -> Any:
    """What a module has under a name.

    Raises:
        ConfigError: it has nothing.
    """
    if not hasattr(module, name):
        place, near = getattr(module, "__file__", None) or module.__name__, did_you_mean(name, vars(module))
        raise ConfigError(f"{option}: there is no {name} in {place}.{near}")
    return getattr(module, name)


def load_function(option: str, place: str) -> Callable[..., Any]:
    """Import what an option names as module:function or file.py:function. A file that was named before, such as the
    environment's, is imported a second time only if it has changed, as between two runs in a notebook.

    Raises:
        ConfigError: there is no such file, module or function, or it cannot be called.
        EnvironmentFailed: importing it raised; the message has the line in the user's code.
    """
    module, _, name = place.rpartition(":")
    file = file_of(module, option)
    with no_bytecode(), users_errors(f"{option}: {module} cannot be imported"):
        if file is None or not module.endswith(".py"):
            found = import_module(module)
        else:
            known = _imported.get((file, file.stat().st_mtime), "")
            found = sys.modules.get(known) or import_file(file)
    function = member(found, name, option)
    if not callable(function):
        raise ConfigError(f"{option}: {name} in {module} is not a function")
    return function  # type: ignore[no-any-return]


def check_signature(factory: Callable[..., object], name: str, keywords: Mapping[str, object]) -> None:
    """Check keywords against the signature of a class or function, if it has one that names its parameters.

    Raises:
        ConfigError: a keyword is not accepted, or a required one is missing.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # the call itself will show
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        names = signature.parameters
        near = "".join(did_you_mean(keyword, names) for keyword in keywords if keyword not in names)
        takes = ", ".join(names) or "nothing"
        raise ConfigError(f"rl_env_config: {name}: {error}.{near}\nIt takes: {takes}") from None


def source_files(places: Iterable[Place] = (), objects: Iterable[object] = (), framework: str = "") -> list[Path]:
    """The files of these places, then those that define these functions, classes and objects, each once; without those
    of aitrain, of Python and of the framework, whose version says what they are."""
    files = [file for module, _ in places if module and (file := file_of(module))]
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
    file = file_of(module)
    if file is None or file.name != "__init__.py":
        return [] if file is None else [file]
    return [file, *(other for other in sorted(file.parent.rglob("*.py")) if other != file)]


def file_of(module: str, option: str = "rl_env", others: Iterable[str] = ()) -> Path | None:
    """The source file of a file or module; None for a module without source. `others` are known names as well.

    Raises:
        ConfigError: there is none.
    """
    if module.endswith(".py"):
        file = Path(os.path.expanduser(module))
        if not os.path.isfile(file):  # False for a name that is too long as well
            raise ConfigError(f"{option}: {no_file(module)}")
        return file.resolve()
    specs = module_specs(module) if all(part.isidentifier() for part in module.split(".")) else []
    origin = specs[-1].origin if specs else None
    if origin is None:
        here = Path.cwd()
        files = [*here.glob("*.py"), *here.glob("*/*.py")]
        modules = [".".join(file.relative_to(here).with_suffix("").parts) for file in files]
        raise ConfigError(
            f"{option}: there is no module {module or '?'} (looked in {here} and among the installed packages)."
            f"{did_you_mean(module, [*modules, *others])}\nName a file as path/to/file.py:NAME, a module as"
            " package.module:NAME"
        )
    return Path(origin) if origin.endswith(".py") else None
