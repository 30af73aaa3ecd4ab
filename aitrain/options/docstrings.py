"""Docstrings under the fields of a class, read from its source."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


@cache
def field_docstrings(owner: type) -> dict[str, str]:
    """The docstring under each annotated field of a class, as one line; empty if the source is unavailable.

    pydantic's `use_attribute_docstrings` searches the stack for each class that is made: too slow for `--help`.
    """
    found: dict[str, str] = {}
    for node, below in pairwise(_classes(owner.__module__).get(owner.__name__, ())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            found[node.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of each top-level class of a module, by its name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
