"""Modules and files of the user's: found and parsed without running them, and imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from aitrain.errors import EnvironmentFailed
from aitrain.packages import in_working_directory, installed


def module_specs(module: str) -> list[ModuleSpec]:
    """Import specs of a module's parent packages and the module, found without importing any.

    The working directory comes first, so that an installed package called `tests` does not hide the user's.
    """
    top, *rest = module.split(".")
    chains = [_down(spec, rest) for spec in (in_working_directory(top), installed(top)) if spec is not None]
    found = [chain for chain in chains if len(chain) == len(rest) + 1]
    return next((chain for chain in found if chain[-1].origin is not None), found[0] if found else [])


def _down(spec: ModuleSpec, names: list[str]) -> list[ModuleSpec]:
    chain = [spec]
    for name in names:
        below = PathFinder.find_spec(f"{chain[-1].name}.{name}", list(chain[-1].submodule_search_locations or []))
        if below is None:
            break
        chain.append(below)
    return chain


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        EnvironmentFailed: the file cannot be read, or is not valid Python.
    """
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise EnvironmentFailed(f"{file}{line}: {type(error).__name__}: {error.msg}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EnvironmentFailed(f"{file} cannot be read: {why}") from None


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Module-level statements, including those inside `if`, `try` and `with`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from top_level(node)


def names_in(tree: ast.Module) -> set[str]:
    """Names that a module's top level binds; `*` for those of a star import."""
    names = set()
    for node in top_level(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def execute(spec: ModuleSpec) -> ModuleType:
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


def import_file(name: str, file: Path) -> ModuleType:
    """Import a file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # a file that ends in .py always has a loader
    return execute(spec)


def import_module(name: str) -> ModuleType:
    """Import a module; the working directory comes first."""
    if name.partition(".")[0] not in sys.modules:
        execute(module_specs(name)[0])
    return importlib.import_module(name)


def add_to_path(folder: Path) -> None:
    """Let imports find modules of this folder and of the working directory. They are appended to `sys.path`, so that
    they do not hide libraries of the same name."""
    sys.path += [place for place in dict.fromkeys((str(folder), str(Path.cwd()))) if place not in sys.path]
