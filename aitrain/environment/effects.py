"""Known effects of functions and methods of Python and common libraries, by name."""

from __future__ import annotations

import ast
import random
import threading
from contextvars import ContextVar
from types import ModuleType

from aitrain.environment.abstract_values import EMPTY, UNKNOWN, Value

MUTATING_METHODS = {
    "pop", "popitem", "clear", "remove", "discard", "sort", "reverse", "popleft", "rotate", "subtract", "setdefault",
    "difference_update", "intersection_update", "symmetric_difference_update", "move_to_end", "__setitem__",
    "__delitem__", "fill", "resize", "fill_", "copy_", "add_", "zero_", "put_nowait", "get_nowait", "seek", "truncate",
    "read", "readline", "send", "throw", "__next__",
}  # fmt: skip
MUTATING_OBJECT_METHODS = {
    "reset", "step", "seed", "push", "undo", "set_state", "load_state", "set_seed", "restore", "fetchone", "fetchall",
    "fetchmany",
}  # fmt: skip
ITEM_METHODS = {"get", "setdefault", "values", "items", "pop", "popitem", "popleft", "__getitem__", "keys"}
MUTATES_FIRST_ARGUMENT = {
    "shuffle", "heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort", "insort_left", "insort_right",
    "next", "anext",
}  # fmt: skip
PURE_FUNCTIONS = {
    "print", "str", "repr", "isinstance", "hasattr", "id", "dir", "hash", "callable", "bool", "len", "format", "iter",
}  # fmt: skip
PER_THREAD_TYPES = (threading.local, ContextVar)
CONTAINERS = (list, dict, set, bytearray)
PER_CALL_PARAMETERS = {"model", "tokenizer", "completion", "messages", "text", "reply", "seed"}
"""Parameters whose value differs between calls with the same case_idx."""
BUILTIN_METHODS = {name for kind in (str, bytes, int, float, list, dict, set, tuple) for name in dir(kind)}
LOG_METHODS = {"debug", "info", "warning", "warn", "error", "log"}
VIEW_METHODS = {
    "reshape", "view", "ravel", "squeeze", "unsqueeze", "transpose", "swapaxes", "permute", "T", "flat", "data",
    "expand", "select", "narrow", "detach", "numpy", "diagonal", "getbuffer",
}  # fmt: skip
ARRAY_MUTATES_FIRST_ARGUMENT = {"copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis"}
PROCESS_WIDE_EFFECTS = {
    ("os", "chdir"): "the working directory", ("posix", "chdir"): "the working directory",
    ("os", "putenv"): "os.environ", ("os", "umask"): "the umask",
    ("random", "seed"): "Python's random numbers", ("random", "setstate"): "Python's random numbers",
    ("numpy.random", "seed"): "numpy's random numbers", ("numpy.random", "set_state"): "numpy's random numbers",
    ("torch.random", "manual_seed"): "torch's random numbers", ("torch", "manual_seed"): "torch's random numbers",
    ("contextlib", "redirect_stdout"): "sys.stdout", ("contextlib", "redirect_stderr"): "sys.stderr",
    ("contextlib", "chdir"): "the working directory", ("locale", "setlocale"): "the locale",
}  # fmt: skip
"""Process-wide state that these functions change."""
INJECTIVE_CALLS = {"str", "repr", "tuple", "dumps", "sha256", "sha1", "md5", "blake2b", "encode", "hexdigest", "digest"}
"""Calls whose results are equal only for equal arguments, so that they may compute the key of a cache."""


def process_wide_effect(callee: Value) -> str | None:
    """Process-wide state that a function changes; None if it has no such effect."""
    known = callee.known
    if known is UNKNOWN or not callable(known):
        return None
    owner = getattr(known, "__self__", None)
    module = getattr(known, "__module__", None) or ""
    if owner is not None and not isinstance(owner, ModuleType):  # random.seed is a method of a generator object
        module = "random" if owner is getattr(random, "_inst", None) else type(owner).__module__
        module = "numpy.random" if module.startswith("numpy.random") and callee.roots == EMPTY else module
    name = getattr(known, "__name__", "")
    return PROCESS_WIDE_EFFECTS.get((module, name)) if not callee.roots else None


def is_display(node: ast.expr) -> bool:
    """Whether an expression is a container display, so that `x += ...` changes x in place."""
    return isinstance(node, (ast.List, ast.ListComp, ast.Tuple, ast.Set, ast.SetComp, ast.Dict, ast.DictComp))


def is_query(statement: Value) -> bool:
    """Whether an SQL statement is read-only."""
    text = statement.known
    return isinstance(text, str) and text.lstrip().lower().startswith(("select", "explain"))


def is_one_time_message(node: ast.If) -> bool:
    """Whether a block only prints a message once: `if not self.told: print(...); self.told = True`."""
    flag = ast.unparse(node.test.operand) if isinstance(node.test, ast.UnaryOp) else ""
    sets = [each for each in node.body if isinstance(each, ast.Assign)]
    calls = [each.value for each in node.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    messages = [name for name in names if name == "print" or name.rpartition(".")[2] in LOG_METHODS]
    is_flag_only = [ast.unparse(target) for each in sets for target in each.targets] == [flag]
    is_constant = all(isinstance(each.value, ast.Constant) for each in sets)
    return is_flag_only and is_constant and not node.orelse and len(sets) + len(messages) == len(node.body)
