"""What the watched calls of an environment have changed.

Calls are watched instead of reading their source. What cannot be compared, such as an open database, is unknown, which
does not mean unchanged.
"""

from __future__ import annotations

import builtins
import copy
import copyreg
import datetime
import decimal
import dis
import fractions
import functools
import gc
import io
import operator
import os
import random
import re
import sys
import threading
import time
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PosixPath, WindowsPath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, ClassVar

from aitrain.errors import AitrainError
from aitrain.execution.user_code import is_users_file

MAX_REFERENCES = 3_000_000
"""Maximum references in a snapshot; comparing two snapshots of this size takes about 0.3 s."""
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
        return StateChange(f"{item.__name__}, a class") if isinstance(item, type) else self._by_holder(item)

    def _by_holder(self, item: object) -> StateChange:
        """The name of an attribute, a class attribute or a global variable from which an object is reached."""
        shown = type(item).__name__
        for roots, prefix in _named_roots(self.environment):
            for name, value in list(roots.items()):
                if value is item:
                    return StateChange(f"{prefix}{name}")
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


@dataclass(eq=False)
class StateWatch:
    """What the watched calls of one environment changed."""

    environment: Any
    by_episode: bool = False
    """Whether all changes are wanted; otherwise the first one ends the watch."""
    changes: list[StateChange] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    """The objects of the changes, as far as they are objects."""
    unknown: str = ""
    """Why it cannot be known what calls change; empty if it can."""
    first: StateSnapshot | None = None
    """What was before the first change."""

    _unseen: dict[CodeType, set[int]] = field(default_factory=dict)  # lines that no watched call has reached
    _namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)
    _files: set[str] = field(default_factory=set)

    @property
    def is_changed(self) -> bool:
        """Whether calls change something, or that cannot be known."""
        return bool(self.changes or self.unknown)

    @property
    def reason(self) -> str:
        """The beginning of a sentence that says what changes, or why that cannot be known."""
        name = type(self.environment).__name__
        if not self.changes:
            return f"What calls of {name} change cannot be known: {self.unknown}"
        place = f" ({self.changes[0].place})" if self.changes[0].place else ""
        return f"A call of {name} changes {self.changes[0].target}{place}"

    def clear(self) -> None:
        """Forget the changes, and not which lines were reached."""
        self.changes, self.changed, self.unknown, self.first = [], [], "", None

    def snapshot(self) -> StateSnapshot | None:
        """A new snapshot; None if it cannot be made, which is noted."""
        try:
            return StateSnapshot(self.environment, list(self._unseen), list(self._namespaces.values()))
        except UnknownStateError as error:
            self.unknown = self.unknown or str(error)
        except Exception as error:  # of a class of the user's, such as a property __dict__
            self.unknown = self.unknown or f"{type(error).__name__}: {error}"
        return None

    def unseen_lines(self, code: CodeType) -> set[int]:
        """Lines of a function that no watched call has reached."""
        if code not in self._unseen:
            self._unseen[code] = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        return self._unseen[code]

    def is_users(self, frame: FrameType) -> bool:
        """Whether a function is the user's, or is in the file of a class of the environment."""
        file = frame.f_code.co_filename
        if file.startswith("<"):  # made by `exec`, as dataclasses make methods
            module = sys.modules.get(str(frame.f_globals.get("__name__")))
            return module is None or module is builtins or is_users_module(module)
        return is_users_file(file) or file in self._files_of_classes

    @functools.cached_property
    def _files_of_classes(self) -> set[str]:
        modules = [sys.modules.get(kind.__module__) for kind in type(self.environment).__mro__]
        files = {str(getattr(module, "__file__", "")) for module in modules}
        return {file for file in files if "site-packages" in file}

    def note(self, snapshot: StateSnapshot, place: str = "", is_alone: bool = True, seeds_torch: bool = True) -> bool:
        """Note what differs from a snapshot; returns whether anything does that matters."""
        objects = snapshot.changed_objects()
        changes = [replace(snapshot.describe(item), place=place) for item in objects]
        if is_alone:  # beside others, libraries may change the state of the process
            shared = snapshot.changed_process_state()
            changes += [replace(each, place=place) for each in shared if seeds_torch or each.target != TORCH_SEED]
        if changes:
            self.first = self.first or snapshot
            self.changes += changes
            self.changed += objects
        return bool(changes)

    def note_files(self, written: set[str], place: str) -> None:
        """Note the files that this watched call wrote, and an earlier one too."""
        self.changes += [StateChange(f"the file {Path(name).name}", place) for name in sorted(written & self._files)]
        self._files |= written

    def reached(self, namespace: dict[str, Any]) -> bool:
        """Note the module of code that is called; returns whether it is new."""
        is_new = id(namespace) not in self._namespaces
        self._namespaces[id(namespace)] = namespace
        return is_new


MAX_SECONDS = 5.0
"""Seconds of comparisons in one watched call."""
MAX_EVENTS = 20_000
"""Traced events of a call that runs beside others, about 6 ms; what it does later shows in the comparison only."""
_WRITES = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("STORE_", "DELETE_", "CALL", "BINARY_OP", "FOR_ITER", "SEND", "YIELD_VALUE"))
    and not name.endswith("_FAST")
)
"""Instructions that may change an object; a change is seen before the next of them, which might undo it."""


_TRACE_LOCK = threading.Lock()


def set_trace(tracer: CallTracer | None) -> None:
    """Set the trace function of the calling thread. Python does not allow two threads to do so at the same time."""
    with _TRACE_LOCK:
        before = sys.gettrace()  # freed after it was replaced
        sys.settrace(tracer)
    del before


class CallTracer:
    """Traces one call: as long as it runs beside others, for lines that no watched call has reached; once it runs
    alone, for what it changes. `wait_until_alone` is called before such a line."""

    def __init__(self, watch: StateWatch, wait_until_alone: Callable[[], None]) -> None:
        self.watch, self._wait_until_alone = watch, wait_until_alone
        self.is_alone = self.is_over = False
        self.on_loop: CallTracer = self
        """The tracer of `async def` methods of this call, which run on the loop that all calls share."""
        self.written: WrittenFiles | None = None
        self._snapshot: StateSnapshot | None = None
        self._looks: dict[tuple[CodeType, int, str], int] = {}
        self._stored: tuple[StateChange, Any] | None = None  # an assignment that the next instruction will have made
        self._events, self._seconds, self._place = 0, 0.0, ""
        self._seeds_torch = False  # whether a function that was called names torch's generator

    def begin_alone(self) -> None:
        """Compare from now on; no other call may run."""
        self.written = WrittenFiles()
        self._snapshot, self.is_alone = self.watch.snapshot(), True

    def begin_on_loop(self) -> None:
        """Trace the calling thread, which is that of the loop."""
        set_trace(self.on_loop)

    def end(self) -> None:
        """Compare at the end of the call."""
        self.is_over = True
        if self.written is not None:
            self.look(at_end=True)
            self.written.stop()
            self.watch.note_files(self.written.names, self._place)

    def abandon(self) -> None:
        """Stop watching the call before it ends."""
        self.is_over = True
        if self.written is not None:
            self.written.stop()

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Trace a frame of the user's code."""
        if self.is_over:
            set_trace(None)
            return None
        code = frame.f_code
        if not self.is_alone:
            self._events += 1
            if self._events > MAX_EVENTS:
                set_trace(None)
            return self._trace if self.watch.is_users(frame) and self.watch.unseen_lines(code) else None
        self._seeds_torch |= "default_generator" in code.co_names  # as torch.manual_seed does
        if not self.watch.is_users(frame):
            return None
        if (
            self.watch.reached(frame.f_globals)
            and self._snapshot
            and id(frame.f_globals) not in self._snapshot.walk.seen
        ):
            self.look()
            self._snapshot = self.watch.snapshot()
        frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if self.is_over:
            return None
        if event == "line":
            self._see_line(frame)
        elif self.is_alone and event in ("opcode", "return"):
            steps, places = _steps(code)
            step = steps[places.get(frame.f_lasti, 0)]
            if self._stored is not None:
                self._look_after_store()
            key = (code, frame.f_lasti, event)
            if (event == "return" or step.opcode in _WRITES) and self._looks.get(key, 0) < 3:
                self._looks[key] = self._looks.get(key, 0) + 1
                self.look()
                if event == "opcode" and self._snapshot and not self.is_over:
                    self._note_store(frame, step)
            self._place = self._place_of(frame)
        elif not self.is_alone:
            self._events += 1
            if self._events > MAX_EVENTS:
                set_trace(None)
        return self._trace

    def _see_line(self, frame: FrameType) -> None:
        unseen = self.watch.unseen_lines(frame.f_code)
        if not self.is_alone:
            self._events += 1
            if frame.f_lineno in unseen:
                self._wait_until_alone()
                self.begin_alone()
                stack: FrameType | None = frame
                while stack is not None:  # its callers are traced by instructions too, when they continue
                    stack.f_trace_opcodes = stack.f_trace is not None
                    stack = stack.f_back
        unseen.discard(frame.f_lineno)

    def look(self, at_end: bool = False) -> None:
        """Compare with the snapshot."""
        if self._snapshot is None or (self.is_over and not at_end):
            return
        start = time.perf_counter()
        try:
            if self._snapshot.is_changed(at_end):
                # an engine's thread may seed torch while this call runs
                is_noted = self.watch.note(self._snapshot, self._place, seeds_torch=self._seeds_torch)
                if is_noted and not self.watch.by_episode:
                    self.is_over = True  # the verdict is known
                elif not at_end:
                    self._snapshot = self.watch.snapshot()
        except Exception as error:  # it must not get into the user's code
            self.watch.unknown = self.watch.unknown or str(error) or type(error).__name__
        self._seconds += time.perf_counter() - start
        if self._seconds > MAX_SECONDS and not at_end:
            self.watch.unknown = self.watch.unknown or f"comparing what it refers to takes more than {MAX_SECONDS:g} s"
            self.is_over = True

    def _look_after_store(self) -> None:
        """Note the assignment that was held, if nothing differs: it was of an equal value, and may be of another."""
        assert self._stored is not None
        (change, target), self._stored = self._stored, None
        if self._snapshot is not None and not self.is_over and not self._snapshot.is_changed(at_end=False):
            self.watch.first = self.watch.first or self._snapshot
            self.watch.changes.append(change)
            self.watch.changed.append(target)
            self.is_over = not self.watch.by_episode

    @staticmethod
    def _place_of(frame: FrameType) -> str:
        return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"

    def _note_store(self, frame: FrameType, step: dis.Instruction) -> None:
        """Hold an assignment to an object that other calls see: the value may be the same as before."""
        assert self._snapshot is not None
        code, walk, name = frame.f_code, self._snapshot.walk, str(step.argval)
        steps, places = _steps(code)
        target: Any = None
        if step.opname.endswith("_GLOBAL"):
            target = frame.f_globals
        elif step.opname.endswith("_DEREF") and (function := walk.functions.get(code)) is not None:
            if name in code.co_freevars and function.__closure__:
                target = function.__closure__[code.co_freevars.index(name)]
        elif step.opname.endswith("_ATTR"):
            target, _ = _loaded(frame, steps, places[frame.f_lasti] - 1)
            if is_not_watched(getattr(target, "__dict__", {}).get(name)):
                return  # `self.client = self.client or Client()`
            name = f"{'self' if target is self.watch.environment else type(target).__name__}.{name}"
        elif step.opname.endswith("_SUBSCR"):
            _, before = _loaded(frame, steps, places[frame.f_lasti] - 1)  # the key
            target, _ = _loaded(frame, steps, before)
            name = f"an item of a {type(target).__name__}"
        if target is not None and target in walk:
            self._stored = (StateChange(name, self._place_of(frame)), target)


def _loaded(frame: FrameType, steps: list[dis.Instruction], end: int) -> tuple[Any, int]:
    """The object that the instructions up to `end` load, None if it cannot be found without running code of the user;
    and where the instructions before them end."""
    kind, name = (steps[end].opname, steps[end].argval) if end >= 0 else ("", "")
    if kind.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
        return frame.f_locals.get(name[-1] if isinstance(name, tuple) else name), end - 1
    if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
        return frame.f_globals.get(name), end - 1
    if kind == "LOAD_CONST":
        return name, end - 1
    if kind == "LOAD_ATTR":
        owner, before = _loaded(frame, steps, end - 1)
        if name == "__dict__":
            return getattr(owner, "__dict__", None), before
        of_class = None if isinstance(owner, (type, ModuleType)) else class_attribute(owner, name)
        if isinstance(of_class, types.MemberDescriptorType):
            return getattr(owner, name, None), before
        found = getattr(owner, "__dict__", {}).get(name, of_class)
        return None if hasattr(type(found), "__get__") else found, before
    if kind == "BINARY_SUBSCR":
        key, before = _loaded(frame, steps, end - 1)
        owner, before = _loaded(frame, steps, before)
        if type(owner) in (list, tuple, dict) and type(key) in (str, int, bool):
            with suppress(LookupError, TypeError):
                return owner[key], before
    return None, end - 1


@functools.lru_cache(maxsize=4096)
def _steps(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """The instructions of a function, and the index of each by its offset."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    return steps, {step.offset: index for index, step in enumerate(steps)}


@dataclass(frozen=True)
class CopyPlan:
    """How each episode gets an environment of its own: the named attributes are copied, the others are shared."""

    own: frozenset[str] = frozenset()

    def copy_of(self, environment: object) -> object:
        """Copy the environment for one episode.

        Raises:
            Exception: the environment cannot be copied.
        """
        kind, attributes = type(environment), vars(environment)
        copied = object.__new__(kind)
        memo = {id(value): value for name, value in attributes.items() if name not in self.own}
        memo[id(environment)] = copied
        for name, value in attributes.items():
            vars(copied)[name] = copy.deepcopy(value, memo) if name in self.own else value
        return copied

    @classmethod
    def for_changes(cls, environment: Any, changed: list[object]) -> CopyPlan:
        """The plan that copies what calls changed, and what leads there.

        Raises:
            ValueError: a copy would not separate episodes, for the reason of the message.
        """
        for name in ("__slots__", "__del__"):
            if any(name in vars(owner) for owner in type(environment).__mro__[:-1]):
                raise ValueError(f"it has {name}")
        changes_itself = any(item is environment or item is vars(environment) for item in changed)
        targets = [item for item in changed if item is not vars(environment)] + [environment] * changes_itself
        own, below = set[str](), set[int]()
        for name, value in vars(environment).items():
            walk = Walk([value], without=[vars(environment)], through_code=False)
            own |= {name} if any(item in walk for item in targets) else set()
            below |= set(walk.seen)
        if not all(item is environment or id(item) in below for item in targets):
            raise ValueError("it is not below the environment")
        plan = cls(frozenset(own))
        try:
            copied = Walk(vars(plan.copy_of(environment)).values(), through_code=False)
        except Exception as error:
            raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:100]) from error
        if any(item in copied for item in targets):
            raise ValueError("a copy of the environment still refers to it")
        return plan
