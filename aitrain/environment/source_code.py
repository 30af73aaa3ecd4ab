"""The syntax tree of a function that is loaded, wherever its source can still be had."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FunctionType

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def function_node(function: FunctionType) -> FunctionNode | None:
    """Where and how a function is written; None for one that was made by `exec`, or has lost its file."""
    code = function.__code__
    linecache.lazycache(code.co_filename, function.__globals__)  # a loader may have the source of a zipped module
    lines = tuple(linecache.getlines(code.co_filename))
    found = _functions(lines).get((code.co_firstlineno, code.co_name), [])
    return found[0] if len(found) == 1 else None  # two lambdas on one line cannot be told apart


@functools.lru_cache(maxsize=32)
def _functions(lines: tuple[str, ...]) -> dict[tuple[int, str], list[FunctionNode]]:
    """By first line (that of a decorator) and name, as code objects have them."""
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
