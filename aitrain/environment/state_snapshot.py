"""What the objects of an environment hold at one time, and what has changed since."""

from __future__ import annotations

import builtins
import copyreg
import functools
import gc
import io
import operator
import os
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from aitrain.environment.object_walk import (
    LEAVES,
    UnknownStateError,
    Walk,
    class_attribute,
    is_array,
    is_not_watched,
    is_users_class,
    names_in,
)

LARGE_ARRAY = 1 << 20
"""Bytes of an array above which it is compared at the end of a call only."""

_CONTAINERS: frozenset[type] = frozenset((
    list, dict, set, frozenset, tuple, deque, OrderedDict, defaultdict, types.MappingProxyType, types.CellType,
    types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, types.SimpleNamespace, property, staticmethod,
    classmethod, functools.partial, BaseException, super, type({}.keys()), type({}.values()), type({}.items()),
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType, object,
))  # fmt: skip
"""C types whose whole state is what they refer to."""
TORCH_SEED = "the seed of torch"
COPIED = (list, dict, set, deque, bytearray)

_FRAMES = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_HEAP_TYPE = 1 << 9


class _OpaqueError(UnknownStateError):
    """An object of a C type that does not say what it holds."""

    def __init__(self, item: object) -> None:
        super().__init__(f"an object of {type(item).__module__}.{type(item).__qualname__} does not show its state")
        self.item = item


@dataclass(frozen=True)
class StateChange:
    """What a call changed, and the user's line that had run last."""

    target: str
    """`self.case`, `Board.cells`, `COUNT`, `the working directory`."""
    place: str = ""
    """`env.py, line 12`."""
    only_adds: bool = False
    """Whether it is a dict that gained keys and lost none, as a cache does."""


class StateSnapshot:
    """What the mutable objects of an environment refer to or hold at one time.

    Raises:
        UnknownStateError: see Walk.
    """

    def __init__(
        self, environment: Any, codes: Iterable[CodeType] = (), namespaces: Iterable[dict[str, Any]] = ()
    ) -> None:
        """`codes` were called, in modules with these `namespaces`."""
        _replace_openers()  # before the first comparison
        self.environment = environment
        kinds = [kind for kind in type(environment).__mro__ if is_users_class(kind)]
        modules = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]
        code_names = frozenset[str]().union(*map(names_in, codes))
        self.walk = Walk([environment, *kinds, *modules], names=code_names, namespaces=namespaces)
        self._tracked = [vars(builtins), vars(sys), *self.walk.tracked]
        self._dicts: list[dict[Any, Any]] = [item for item in self._tracked if isinstance(item, dict)]
        self._copies: list[tuple[Any, Any]] = [
            (item, _shallow_copy(item)) for item in self._tracked if isinstance(item, COPIED)
        ]
        self._referents = [(item, gc.get_referents(item)) for item in self._tracked]
        self._flat = self._references()
        values = [item for item in self._tracked if not isinstance(item, type) and _has_value(item)]
        try:
            self._large = [(item, _value(item)) for item in values if _is_large(item)]
            self._values = [(item, _value(item)) for item in values if not _is_large(item)]
        except _OpaqueError as error:
            name = self._by_holder(error.item).target
            raise UnknownStateError(f"{name} does not show its state") from None
        self._facts = _process_state()

    def _references(self) -> list[object]:
        return gc.get_referents(*self._tracked) + list(chain.from_iterable(map(dict.keys, self._dicts)))

    def is_changed(self, at_end: bool = True) -> bool:
        """Whether anything differs now; before the end of a call, large arrays are left out."""
        try:
            now = self._references()
        except RuntimeError:  # a call that was abandoned adds to a dict
            return True
        if len(now) != len(self._flat) or not all(map(operator.is_, now, self._flat)):
            return True
        if any(_value(item) != value for item, value in self._values):
            return True
        return any(_value(item) != value for item, value in self._large) if at_end else _process_state() != self._facts

    def changed_objects(self) -> list[object]:
        """The objects that differ now, except in ways that have no effect on scores."""
        dicts = [item for item, before in self._copies if isinstance(item, dict) and self._changed_keys(item, before)]
        others = [item for item, before in self._referents if not isinstance(item, dict) and _differs(item, before)]
        return dicts + others + [item for item, value in (*self._values, *self._large) if _value(item) != value]

    def _changed_keys(self, item: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
        """Keys whose values differ, without those of cached properties and of clients that are made when needed."""
        owner, missing = self.walk.owners.get(id(item)), object()
        found = []
        for key in (*before, *(key for key in item if key not in before)):
            old, new = before.get(key, missing), item.get(key, missing)
            is_made = old is missing or old is None
            if old is new or (isinstance(owner, ModuleType) and key == "__warningregistry__"):
                continue
            if isinstance(key, str) and is_made and isinstance(class_attribute(owner, key), functools.cached_property):
                continue
            if is_made and is_not_watched(new):
                continue
            found.append(key)
        return found

    def describe(self, item: Any) -> StateChange:
        """The change of an object, by the name that the user's code has for it."""
        if isinstance(item, dict):
            before: dict[Any, Any] = next((copied for held, copied in self._copies if held is item), {})
            keys, owner = self._changed_keys(item, before), self.walk.owners.get(id(item))
            if item is vars(builtins) or item is vars(sys):
                return StateChange(f"{'builtins' if item is vars(builtins) else 'sys'}.{keys[0]}")
            if owner is not None and keys:
                prefix = "self." if owner is self.environment else f"{type(owner).__name__}."
                return StateChange(f"{'' if isinstance(owner, ModuleType) else prefix}{keys[0]}")
            only_adds = all(key not in before for key in keys) and len(item) >= len(before)
            return replace(self._by_holder(item), only_adds=only_adds)
        return StateChange(f"{item.__name__}, a class") if isinstance(item, type) else self._by_holder(item)

    def _by_holder(self, item: object) -> StateChange:
        """The name of an attribute, a class attribute or a global variable from which an object is reached."""
        shown = type(item).__name__
        for roots, prefix in _named_roots(self.environment):
            for name, value in list(roots.items()):
                if value is item:
                    return StateChange(f"{prefix}{name}")
        for name, value in getattr(self.environment, "__dict__", {}).items():
            if item in Walk([value], without=[self.environment], through_code=False):
                return StateChange(f"self.{name} ({shown})")
        for roots, prefix in _named_roots(self.environment):
            for name, value in list(roots.items()):
                if item in Walk([value], without=[self.environment], through_code=False):
                    return StateChange(f"{prefix}{name} ({shown})")
        return StateChange(f"an object of type {shown}")

    def changed_process_state(self) -> list[StateChange]:
        """What differs now in the state that all code of the process shares."""
        return [StateChange(name) for name, value in _process_state().items() if value != self._facts.get(name)]

    def restore(self, items: Iterable[object]) -> None:
        """Give containers and attributes of these objects the content that they had."""
        wanted = {id(item) for item in items}
        for item, before in self._copies:
            if id(item) in wanted:
                item.clear()
                (item.update if isinstance(item, (dict, set)) else item.extend)(before)


def _named_roots(environment: Any) -> list[tuple[dict[str, Any], str]]:
    """Namespaces with what their names begin with in the user's code."""
    kinds = [kind for kind in type(environment).__mro__ if is_users_class(kind)]
    classes = [(dict(vars(kind)), f"{kind.__name__}.") for kind in kinds]
    modules = [(vars(sys.modules[kind.__module__]), "") for kind in kinds if kind.__module__ in sys.modules]
    return [(getattr(environment, "__dict__", {}), "self."), *classes, *modules]


def _shallow_copy(item: Any) -> Any:
    """A copy by the C type's own method, which calls no code of the user."""
    return next(kind for kind in COPIED if isinstance(item, kind)).copy(item)


def _differs(item: object, before: list[object]) -> bool:
    now = gc.get_referents(item)
    return len(now) != len(before) or not all(map(operator.is_, now, before))


def _has_value(item: object) -> bool:
    """Whether an object holds more than references."""
    kind = type(item)
    return kind in _FRAMES or (kind is not FunctionType and _c_type(kind) not in _CONTAINERS)  # type: ignore[arg-type]


def _is_large(item: Any) -> bool:
    return is_array(item) and item.nbytes > LARGE_ARRAY


def _value(item: Any) -> object:
    """What an object of a C type holds apart from references, as a value that can be compared.

    Raises:
        UnknownStateError: it does not say.
    """
    kind = type(item)
    if kind in _FRAMES:
        frame = next(
            (getattr(item, name, None) for name in ("gi_frame", "cr_frame", "ag_frame") if hasattr(item, name)), None
        )
        return frame and frame.f_lasti
    if is_array(item):
        return item.shape, item.dtype.str, item.tobytes()
    if isinstance(item, (bytearray, memoryview)):
        return bytes(item)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        is_small = item.device.type == "cpu" and item.layout is torch.strided and item.nbytes <= LARGE_ARRAY
        content = item.detach().flatten().view(torch.uint8).numpy().tobytes() if is_small else None
        return item.data_ptr(), item._version, content  # writing to `.data` makes no new version
    try:
        reduce = copyreg.dispatch_table.get(kind)
        first, second = (_plain(reduce(item) if reduce else item.__reduce_ex__(4)) for _ in range(2))
    except Exception:
        first, second = None, item
    if first != second:
        raise _OpaqueError(item)
    return first


def _plain(part: Any, depth: int = 0) -> object:
    """A reduced object with its new containers as tuples, and other objects by their ids."""
    if depth < 6 and isinstance(part, (tuple, list)):
        return tuple(_plain(each, depth + 1) for each in part)
    if depth < 6 and isinstance(part, dict):
        return tuple((_plain(key, depth + 1), _plain(value, depth + 1)) for key, value in part.items())
    if is_array(part):
        return part.tobytes()
    return part if type(part) in LEAVES else id(part)


def _process_state() -> dict[str, object]:
    """State that all code of the process shares, by its name in sentences."""
    state: dict[str, object] = {"os.environ": dict(os.environ), "sys.stdout": (id(sys.stdout), id(sys.stderr))}
    with suppress(FileNotFoundError):  # the folder was deleted
        state["the working directory"] = os.getcwd()
    generators = {"the seed of random": random.getstate()[1]}
    if numpy := sys.modules.get("numpy"):
        _, key, position, *_ = numpy.random.get_state()
        generators["the seed of numpy.random"] = (key.tobytes(), position)
    # a generator that was seeded has used none of its numbers; one that only draws never has that state and other keys
    state |= {name: value[:-1] for name, value in generators.items() if value[-1] == 624}
    if (torch := sys.modules.get("torch")) and hasattr(torch, "initial_seed"):
        state[TORCH_SEED] = torch.initial_seed()
    return state


class WrittenFiles:
    """The files that are opened to write, until `stop`."""

    active: ClassVar[list[WrittenFiles]] = []

    def __init__(self) -> None:
        self.names: set[str] = set()
        WrittenFiles.active.append(self)

    def stop(self) -> None:
        """Note no more."""
        WrittenFiles.active = [each for each in WrittenFiles.active if each is not self]


@functools.cache
def _replace_openers() -> None:
    """Let `open` and `os.open` note what is written, from now on: an audit hook disturbs tracing, and functions that
    are put back in another order than they were replaced remain."""
    for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
        setattr(module, name, _noting(getattr(module, name)))


def _noting(opener: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(opener)
    def noting(*given: Any, **named: Any) -> Any:
        if WrittenFiles.active:
            path = given[0] if given else named.get("file", named.get("path"))
            mode = given[1] if len(given) > 1 else named.get("flags", named.get("mode", "r"))
            if isinstance(mode, int):  # of os.open
                writes = mode & (os.O_WRONLY | os.O_RDWR) != 0 and not mode & os.O_APPEND
            else:
                writes = "a" not in mode and not set("wx+").isdisjoint(mode)
            if writes and isinstance(path, (str, bytes, os.PathLike)) and not os.fsdecode(path).startswith("/dev/"):
                for each in WrittenFiles.active:
                    each.names.add(os.path.abspath(os.fsdecode(path)))
        return opener(*given, **named)

    return noting


@functools.lru_cache(maxsize=4096)
def _c_type(kind: type) -> type:
    """The first class in the MRO that C code made: its fields may not be references."""
    for base in kind.__mro__:
        parent = base.__base__
        if parent is None or not base.__flags__ & _HEAP_TYPE:
            return base
        slots = sum(type(value) is types.MemberDescriptorType for value in vars(base).values())
        fields = base.__basicsize__ - parent.__basicsize__
        is_python = "__dict__" in vars(base) or "__slots__" in vars(base) or fields == 0
        if not is_python or fields > 8 * (slots + 2):
            return base
    return object
