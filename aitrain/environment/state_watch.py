"""Detects what calls change in memory, by comparing a snapshot of mutable objects after a batch of calls.

The snapshot covers attributes, class attributes and globals that methods refer to, with the containers, arrays and
user-defined objects in them. It complements `state_analysis`, which sees source code only.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, TypeGuard

from aitrain.execution.user_code import is_users_file

CONTAINERS = (list, dict, set, deque)
Container: TypeAlias = list[object] | dict[str, object] | set[object] | deque[object]
MAX_ITEMS = 10_000
"""Maximum items of a snapshot, so that it takes a few milliseconds at most."""
MAX_ARRAY_BYTES = 1 << 20

_NEUTRAL_BASES = {"builtins", "abc", "typing", "collections.abc", "dataclasses"}


def is_small_container(value: object) -> bool:
    """Whether a value is a container that fits into a snapshot."""
    return isinstance(value, CONTAINERS) and len(value) <= MAX_ITEMS


def is_users_object(value: object) -> bool:
    """Whether a value is an instance of a user-defined class without a base class from a library.

    Objects with a library base (HTTP clients, modules, threads) change in ways that do not affect scores.
    """
    if isinstance(value, (type, ModuleType, *CONTAINERS)) or not hasattr(value, "__dict__"):
        return False
    bases = [base.__module__ for base in type(value).__mro__]
    return is_users_module(bases[0]) and all(base in _NEUTRAL_BASES or is_users_module(base) for base in bases)


def is_users_module(name: str) -> bool:
    """Whether a module is the user's; modules without a file, such as notebooks, are."""
    if name in _NEUTRAL_BASES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_users_file(file) if name not in sys.builtin_module_names else False


@dataclass(frozen=True)
class _Snapshot:
    """A mutable object and its content at the time of the snapshot."""

    path: str
    value: Any
    content: Any
    """A shallow copy, which keeps the old items alive, so that identities can be compared."""
    ignored: frozenset[str] = frozenset()
    """Keys that may be added: cached properties."""
    is_namespace: bool = False

    def changes(self) -> Iterator[str]:
        """Paths that changed since the snapshot."""
        if _is_array(self.value):
            if self.content.tobytes() != self.value.tobytes():
                yield self.path
        elif _is_tensor(self.value):
            if not bool((self.content == self.value).all()) and not bool((self.content != self.content).any()):
                yield self.path
        elif isinstance(self.value, dict):
            missing = object()
            names = {**self.content, **self.value}
            changed = [n for n in names if self.content.get(n, missing) is not self.value.get(n, missing)]
            changed = [name for name in changed if name not in self.ignored]
            if changed:
                yield from [f"{self.path}.{name}" for name in changed] if self.is_namespace else [self.path]
        elif len(self.content) != len(self.value) or not all(map(_is, self.content, self.value)):
            yield self.path

    def restore(self) -> None:
        """Restore the content."""
        if _is_array(self.value):
            with suppress(ValueError):  # a read-only array
                self.value[...] = self.content
        elif _is_tensor(self.value):
            self.value.data.copy_(self.content)
        else:
            self.value.clear()
            (self.value.update if isinstance(self.value, (dict, set)) else self.value.extend)(self.content)


def _is(one: object, other: object) -> bool:
    return one is other


def _is_array(value: object) -> TypeGuard[Any]:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "flags")


def _is_tensor(value: object) -> TypeGuard[Any]:
    return type(value).__module__ == "torch" and type(value).__name__ == "Tensor"


class StateWatch:
    """Records the paths that a batch of calls writes: `self.case`, `self.client.session`, `Kind.count`, `COUNT`."""

    def __init__(self, environment: object, ignored: frozenset[str] = frozenset()) -> None:
        self.environment, self.ignored = environment, ignored
        self.written: list[str] = []
        self._left = MAX_ITEMS
        self._seen: set[int] = {id(environment)}
        self._held: list[_Snapshot] = []
        self._attributes = [(owner, dict(values)) for owner, values in _outer_values(environment)]
        if hasattr(environment, "__dict__"):
            self._hold("self", vars(environment), _cached_properties(environment), is_namespace=True)
        for owner, values in self._attributes:
            for name, value in values.items():
                self._follow(_outer_path(environment, owner, name), value)

    def _hold(
        self, path: str, value: Container, ignored: frozenset[str] = frozenset(), is_namespace: bool = False
    ) -> None:
        items = list(value.values()) if isinstance(value, dict) else list(value)
        keys = list(value) if isinstance(value, dict) else [""] * len(items)
        self._left -= len(items)
        self._held.append(_Snapshot(path, value, value.copy(), ignored, is_namespace))
        for key, item in zip(keys, items, strict=True):
            self._follow(f"{path}.{key}" if is_namespace else f"{path}[]", item)

    def _follow(self, path: str, value: object) -> None:
        if id(value) in self._seen or isinstance(value, (str, int, float, type(None))):
            return
        self._seen.add(id(value))
        if isinstance(value, CONTAINERS):
            if len(value) <= self._left:
                self._hold(path, value)
        elif isinstance(value, tuple):
            for item in value[: max(self._left, 0)]:
                self._follow(f"{path}[]", item)
        elif (_is_array(value) or _is_tensor(value)) and value.nbytes <= min(MAX_ARRAY_BYTES, self._left * 1024):
            self._left -= value.nbytes // 1024
            copied = value.copy() if _is_array(value) else value.detach().clone()
            self._held.append(_Snapshot(path, value, copied))
        elif is_users_object(value) and len(vars(value)) <= self._left:
            self._hold(path, vars(value), _cached_properties(value), is_namespace=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record attribute assignments in this context, including those that are reverted, and compare at its end."""
        with _recorded_assignments(self.environment, self.written):
            yield
        self.compare()

    def compare(self) -> None:
        """Record what differs from the snapshot."""
        found = dict.fromkeys(self.written)
        for held in self._held:
            found |= dict.fromkeys(held.changes())
        for owner, values in self._attributes:
            now = vars(owner) if isinstance(owner, type) else owner
            changed = [name for name, value in values.items() if now.get(name) is not value]
            found |= dict.fromkeys(_outer_path(self.environment, owner, name) for name in changed)
        ignored = self.ignored | {f"self.{name}" for name in _cached_properties(self.environment)}
        self.written[:] = [path for path in found if not _is_below(path, ignored)]

    def restore(self) -> None:
        """Restore attributes and the content of containers and arrays."""
        for owner, values in self._attributes:
            if isinstance(owner, dict):
                owner.update(values)
            else:
                for name, value in values.items():
                    if vars(owner).get(name) is not value:
                        setattr(owner, name, value)
        for held in self._held:
            held.restore()


def _is_below(path: str, roots: frozenset[str]) -> bool:
    return any(path == root or path.startswith((root + ".", root + "[")) for root in roots)


def _outer_path(environment: object, owner: object, name: str) -> str:
    return f"{type(environment).__name__}.{name}" if isinstance(owner, type) else name


def _outer_values(environment: object) -> Iterator[tuple[type | dict[str, object], dict[str, object]]]:
    """Class attributes of the environment, and globals that its methods refer to."""
    for owner in type(environment).__mro__[:-1]:
        if not is_users_module(owner.__module__):
            continue
        yield owner, {name: value for name, value in vars(owner).items() if _is_data(name, value)}
        functions = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
        for function in functions:
            named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
            yield (
                function.__globals__,
                {
                    name: value
                    for name, value in named.items()
                    if name in function.__globals__ and _is_data(name, value)
                },
            )


def _is_data(name: str, value: object) -> bool:
    is_code = inspect.isroutine(value) or isinstance(value, (type, ModuleType, property, cached_property))
    return not (name.startswith("__") or is_code or hasattr(type(value), "__get__"))


def _cached_properties(value: object) -> frozenset[str]:
    kinds = type(value).__mro__
    return frozenset(n for kind in kinds for n, each in vars(kind).items() if isinstance(each, cached_property))


@contextmanager
def _recorded_assignments(environment: object, written: list[str]) -> Iterator[None]:
    """Record each attribute assignment on this object, including those that are reverted."""
    kind = type(environment)
    before: Callable[..., None] = kind.__setattr__
    own = vars(kind).get("__setattr__")

    def note(self: object, name: str, value: object) -> None:
        if self is environment:
            written.append(f"self.{name}")
        before(self, name, value)

    try:
        type.__setattr__(kind, "__setattr__", note)
    except TypeError:  # a class implemented in C
        yield
        return
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(kind, "__setattr__")
        else:
            type.__setattr__(kind, "__setattr__", own)


def reaches(value: object, environment: object) -> bool:
    """Whether the environment is reachable from a value through containers, methods and user-defined objects."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < MAX_ITEMS:
        each = left.pop()
        if each is environment:
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        left += _parts(each)
    return False


def _parts(value: object) -> list[object]:
    if inspect.ismethod(value):
        return [value.__self__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    return list(vars(value).values()) if is_users_object(value) else []


def closes_over(value: object, environment: object) -> bool:
    """Whether a function's closure holds the environment, so that a copy cannot replace it."""
    if not isinstance(value, FunctionType):
        return False
    for cell in value.__closure__ or ():
        with suppress(ValueError):
            if cell.cell_contents is environment:
                return True
    return False
