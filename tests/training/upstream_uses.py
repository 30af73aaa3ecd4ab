"""Finds what aitrain uses from the inside of TRL, transformers, peft, vLLM and Typer, by reading its own source."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPSTREAM = {"accelerate", "click", "datasets", "peft", "transformers", "trl", "typer", "vllm"}
HELD_AS = {"trainer", "vllm_generation", "scheduler", "lr_scheduler", "generation", "_generation"}
"""Names of variables and attributes that hold an object of TRL or transformers."""
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "getattr_static"}


@cache
def uses() -> dict[str, set[str]]:
    """Each inside name that aitrain reads, sets, calls, replaces, overrides or imports, with the places.

    These are: names that begin with an underscore and that aitrain does not define; upstream members that a subclass
    overrides; and attributes of TRL's trainer and its vLLM generation, public ones as well, because none of them is
    documented.
    """
    files = sorted((ROOT / "aitrain").rglob("*.py"))
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = defaultdict(set)
    for place, tree in trees.items():
        for name in (*_imported(tree), *_private(tree, own), *_trainer_attributes(tree)):
            found[name].add(place)
    for place, name in _inherited(trees):
        found[name].add(place)
    return dict(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that aitrain gives itself: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names from private modules, and private names, of upstream packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UPSTREAM:
            is_private_module = any(map(_is_private, str(node.module).split(".")))
            yield from (alias.name for alias in node.names if is_private_module or _is_private(alias.name))


def _private(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """`thing._name`, and "_name" where a string may name an attribute: in getattr and the like, dicts, subscripts."""
    for node in ast.walk(tree):
        for name in (node.attr,) if isinstance(node, ast.Attribute) else _attribute_names(node):
            if name.isidentifier() and _is_private(name) and name not in own:
                yield name


def _attribute_names(node: ast.AST) -> Iterator[str]:
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ATTRIBUTE_FUNCTIONS:
        parts = [*node.args]
    elif isinstance(node, ast.Subscript):
        parts = [node.slice]
    elif isinstance(node, ast.Dict):
        parts = node.keys
    elif isinstance(node, ast.Set):
        parts = [*node.elts]
    yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _trainer_attributes(tree: ast.AST) -> Iterator[str]:
    """`trainer.name`, `self.trainer.name` and the like, where TRL or transformers sets that name."""
    known = _members("trl.GRPOTrainer") | _members("trl.generation.vllm_generation.VLLMGeneration")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in HELD_AS:
            yield from {node.attr} & known


def _inherited(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """(file, name) of the upstream members that our subclasses use as `self.name`, override, or replace for a while."""
    classes = {node.name: (place, node, tree) for place, tree in trees.items() for node in ast.walk(tree)
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    for place, node, _ in classes.values():
        known = set().union(*(_members(path) for path in _upstream_bases(node.name, classes)))
        used = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_self(each.value)}
        used |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        used |= {str(key.value) for each in ast.walk(node) if isinstance(each, ast.Dict)
                 for key in each.keys if isinstance(key, ast.Constant)}  # fmt: skip
        yield from ((place, name) for name in used & known if not name.startswith("__"))


def _is_self(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "super()")


def _upstream_bases(name: str, classes: dict[str, tuple[str, ast.ClassDef, ast.Module]]) -> Iterator[str]:
    """`trl.GRPOTrainer`, for each upstream class that a class of ours inherits from, directly or not."""
    if name not in classes:
        return
    _, node, tree = classes[name]
    imported = {alias.name: f"{each.module}.{alias.name}" for each in ast.walk(tree)
                if isinstance(each, ast.ImportFrom) and (each.module or "").partition(".")[0] in UPSTREAM
                for alias in each.names}  # fmt: skip
    for base in map(ast.unparse, node.bases):
        if base in imported:
            yield imported[base]
        else:
            yield from _upstream_bases(base, classes)


@cache
def _members(path: str) -> set[str]:
    """Names of an upstream class and of its upstream bases: members, and attributes that their methods set."""
    module, _, name = path.rpartition(".")
    kinds = [kind for kind in getattr(importlib.import_module(module), name).__mro__[:-1]
             if kind.__module__.partition(".")[0] in UPSTREAM]  # fmt: skip
    return set().union(*(set(vars(kind)) | _set_in(kind) for kind in kinds))


def _set_in(kind: type) -> set[str]:
    tree = ast.parse(inspect.getsource(kind))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}  # fmt: skip
