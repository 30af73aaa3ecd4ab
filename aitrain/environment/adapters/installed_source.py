"""The source of installed frameworks, read without importing them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

from aitrain.environment.user_modules import parse
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.packages import installed


def source_files(package: str) -> Iterator[Path]:
    """The Python files of an installed package, in order."""
    spec = installed(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder).rglob("*.py"))


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    """A class of a module; an empty one if it is not defined there."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, ast.ClassDef(name, bases=[], keywords=[], body=[], decorator_list=[]))


def fields_of(node: ast.ClassDef) -> set[str]:
    """Fields of a dataclass without those of its base classes."""
    return {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def registrations(package: str) -> dict[str, str]:
    """The ids that `envs/__init__.py` of a package registers with literal arguments, and the entry point of each.

    An id that is put together, as in `f"rg:{name}"`, is given as `rg:*`.
    """
    found = {}
    file = next((file for file in source_files(package) if file.parts[-2:] == ("envs", "__init__.py")), None)
    calls = ast.walk(parse(file)) if file else iter(())
    for call in calls:
        if isinstance(call, ast.Call) and getattr(call.func, "id", "").startswith("register"):
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            id = keywords.get("id") or (call.args[0] if call.args else None)
            entry = keywords.get("entry_point") or (call.args[1] if call.args[1:] else None)
            parts = id.values if isinstance(id, ast.JoinedStr) else [id]
            name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            found[name] = str(entry.value) if isinstance(entry, ast.Constant) else ""
    return found


def parameters_of(entry_point: str) -> set[str] | None:
    """Parameters of the constructor of `module:Class`; None if it takes any, or is not found."""
    module, _, name = entry_point.partition(":")
    package, *rest = module.split(".")
    file = next(
        (file for file in source_files(package) if file.with_suffix("").parts[-len(rest) :] == tuple(rest)), None
    )
    if not rest or file is None:
        return None
    body = class_named(parse(file), name).body
    init = next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init is None or init.args.kwarg:
        return None
    return {argument.arg for argument in [*init.args.args[1:], *init.args.kwonlyargs]}


def keywords_of(adapter: type) -> set[str]:
    """The settings that an adapter's class names."""
    parameters = inspect.signature(adapter).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def check_registered(package: str, id: str, config: Collection[str], settings: Collection[str]) -> None:
    """Check an id and its further settings against the source of a package that registers its environments.

    Raises:
        ConfigError: there is no such id, or its constructor does not take a setting.
    """
    known = registrations(package)
    name = next((name for name in known if fnmatch(id, name)), None)
    if name is None:
        raise ConfigError(f"rl_env: {package} has no environment {id}.{did_you_mean(id, known)}")
    try:
        parameters = parameters_of(known[name])
    except EnvironmentFailed as error:  # some games are written for later versions of Python
        raise ConfigError(f"rl_env: {id} cannot be imported by this Python:\n{error}") from None
    for key in config:
        if parameters is not None and key not in parameters:
            taken = sorted({*settings, *parameters})
            raise ConfigError(
                f"rl_env_config: {id} does not take {key}.{did_you_mean(key, taken)}\nIt takes: {', '.join(taken)}"
            )
