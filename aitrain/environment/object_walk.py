"""Walks what an environment refers to: its objects, its classes, and the global variables that its functions name."""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import functools
import gc
import re
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PosixPath, WindowsPath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from aitrain.errors import AitrainError
from aitrain.execution.user_code import is_users_file

MAX_REFERENCES = 3_000_000
"""References of a snapshot; a comparison of so many takes about 0.3 s."""
LEAVES = {
    str, bytes, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice, re.Pattern,
    re.Match, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
    fractions.Fraction, uuid.UUID, Path, PosixPath, WindowsPath, CodeType, FrameType, types.TracebackType,
}  # fmt: skip
"""Types of values that never change and refer to nothing that does."""

_NOT_WATCHED = (
    "httpx.", "httpcore.", "requests.", "urllib3.", "aiohttp.", "openai.", "anthropic.", "logging.", "_thread.",
    "threading.Condition", "threading.Semaphore", "threading.BoundedSemaphore", "asyncio.locks.", "_contextvars.",
    "_abc.", "_struct.", "importlib.", "_frozen_importlib", "zipimport.", "transformers.", "tokenizers.", "datasets.",
    "pyarrow.", "pydantic_core.", "aitrain.", "numpy.dtype", "numpy.ufunc",
)  # fmt: skip
"""Beginnings of names of types whose objects may change without an effect on scores: clients, loggers, locks,
tokenizers, tables. Objects of classes that users derive from them are watched."""

_LRU_CACHE = type(functools.lru_cache(len))


class UnknownStateError(AitrainError):
    """State that cannot be compared; the message says which."""


def is_users_module(module: object) -> bool:
    """Whether a module is the user's; modules without a file, such as notebooks, are, unless Python contains them."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") not in sys.builtin_module_names and not hasattr(module, "__path__")
    return is_users_file(file)


def is_not_watched(item: object) -> bool:
    """Whether an object is a client, a logger or another one that may change."""
    name = f"{type(item).__module__}.{type(item).__qualname__}"
    return name.startswith(_NOT_WATCHED) and not name.startswith("aitrain.envs.")


def is_users_class(kind: type) -> bool:
    """Whether a class is the user's."""
    module = sys.modules.get(kind.__module__)
    if module is not None and module is not builtins:
        return is_users_module(module)
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(is_users_file(function.__code__.co_filename) for function in functions)  # made by exec


class Walk:
    """The objects that some roots refer to, however deep, as far as calls may change them.

    Raises:
        UnknownStateError: there are too many, or one cannot be compared.
    """

    def __init__(
        self,
        roots: Iterable[object],
        without: Iterable[object] = (),
        through_code: bool = True,
        names: Iterable[str] = (),
        namespaces: Iterable[dict[str, Any]] = (),
    ) -> None:
        """`through_code`: also classes, and the global variables that functions name, or that are among `names`."""
        self.seen: dict[int, object] = {}
        self.tracked: list[object] = []
        self.namespaces: dict[int, dict[str, Any]] = {}
        """Global variables of the users' modules, which are walked by name."""
        self.owners: dict[int, object] = {}
        """Objects and modules by the id of their `__dict__`."""
        self.functions: dict[CodeType, FunctionType] = {}
        self.has_caches = False
        """Whether there are caches or weak references, from which other objects may come later."""
        self._names = set(names)
        self._is_through_code = through_code
        left = {id(item) for item in (vars(builtins), vars(sys), sys.stdout, sys.stderr, sys.stdin, *without)}
        for namespace in namespaces:
            self.add_namespace(namespace, sys.modules.get(str(namespace.get("__name__")), builtins))
        todo, count = list(roots), 0
        self._roots = {id(root) for root in todo}
        while todo or (todo := self._named_globals()):
            item = todo.pop()
            if type(item) in LEAVES or id(item) in self.seen or id(item) in left:
                continue
            self.seen[id(item)] = item
            parts = self._parts(item)
            todo += parts
            count += len(parts)
            if count > MAX_REFERENCES:
                raise UnknownStateError(f"it refers to more than {MAX_REFERENCES:,} objects")

    def add_namespace(self, namespace: dict[str, Any], module: object) -> None:
        """Compare these global variables, and walk those that functions name."""
        if id(namespace) not in self.namespaces:
            self.namespaces[id(namespace)] = self.seen[id(namespace)] = namespace
            self.owners[id(namespace)] = module
            self.tracked.append(namespace)

    def _named_globals(self) -> list[object]:
        """Global variables that are named, and were not walked yet."""
        if not self._is_through_code:
            return []
        values = [space[name] for space in self.namespaces.values() for name in self._names if name in space]
        return [value for value in values if type(value) not in LEAVES and id(value) not in self.seen]

    def __contains__(self, item: object) -> bool:
        return id(item) in self.seen

    def _parts(self, item: Any) -> list[Any]:
        """What an object refers to; notes the object if it can be compared."""
        kind = type(item)
        if issubclass(kind, ModuleType):
            if self._is_through_code and is_users_module(item):
                self.add_namespace(vars(item), item)
            return []
        if isinstance(item, type):
            if not (self._is_through_code and is_users_class(item)):
                return []
        elif kind is FunctionType:
            return self._parts_of_function(item)
        elif kind is _LRU_CACHE or issubclass(kind, weakref.ReferenceType):
            self.has_caches = True
            return _cached_values(item) if kind is _LRU_CACHE else [weakref.ReferenceType.__call__(item)]
        elif issubclass(kind, threading.Thread) and item.is_alive():
            raise UnknownStateError(f"the thread {item.name}, which the environment started, may change anything")
        elif is_not_watched(item) and id(item) not in self._roots:
            return []
        with suppress(AttributeError, TypeError):
            namespace = object.__getattribute__(item, "__dict__")  # a dict from now on, which can be compared
            if not isinstance(item, type):
                self.owners[id(namespace)] = item
        if isinstance(item, BaseException):  # raised again, it only gets another traceback and context
            parts = [kind, item.args, vars(item)]
        else:
            self.tracked.append(item)
            parts = gc.get_referents(item)
        if not self._is_through_code:
            parts = [part for part in parts if not isinstance(part, type)]
        if is_array(item) and item.dtype.hasobject:
            parts += item.ravel().tolist()
        return parts

    def _parts_of_function(self, function: FunctionType) -> list[Any]:
        self.functions[function.__code__] = function
        parts: list[Any] = [*(function.__closure__ or ()), *(function.__defaults__ or ()), vars(function)]
        parts += (function.__kwdefaults__ or {}).values()
        if self._is_through_code and is_users_file(function.__code__.co_filename):
            self._names |= names_in(function.__code__)
            self.add_namespace(function.__globals__, sys.modules.get(function.__module__ or "", builtins))
        return parts


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function uses, with those of the functions inside of it."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _cached_values(cache: Any) -> list[Any]:
    """The keys and values of an `lru_cache`, and its attributes, without the containers that it keeps them in."""
    parts = gc.get_referents(cache)
    inside = [part for part in parts if isinstance(part, dict) and part is not vars(cache)]
    parts += [value for part in inside for value in part.values() if type(value).__name__ != "_lru_list_elem"]
    return [part for part in parts if not isinstance(part, type) and not any(part is each for each in inside)]


def is_array(item: object) -> bool:
    """Whether an object is an array of numpy."""
    return type(item).__module__ == "numpy" and hasattr(item, "tobytes") and hasattr(item, "dtype")


def class_attribute(owner: object, name: str) -> object:
    """An attribute of an object's class or its bases; None if there is none."""
    return next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
