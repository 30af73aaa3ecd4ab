"""Finds the syntax tree of a loaded function."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FunctionType

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def function_node(function: FunctionType) -> FunctionNode | None:
    """Syntax tree of a function; None if its source is not available, as for `exec`."""
    code = function.__code__
    linecache.lazycache(code.co_filename, function.__globals__)  # finds the source of modules in zip files
    lines = tuple(linecache.getlines(code.co_filename))
    found = _functions(lines).get((code.co_firstlineno, code.co_name), [])
    return found[0] if len(found) == 1 else None  # two lambdas on one line are ambiguous


@functools.lru_cache(maxsize=32)
def _functions(lines: tuple[str, ...]) -> dict[tuple[int, str], list[FunctionNode]]:
    """Functions by (first line including decorators, name), as in code objects."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[tuple[int, str], list[FunctionNode]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault((node.lineno, "<lambda>"), []).append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.setdefault((first, node.name), []).append(node)
    return found
