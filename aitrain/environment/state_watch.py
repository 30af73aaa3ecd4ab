"""What the watched calls of an environment have changed.

Calls are watched instead of reading their source. What cannot be compared, such as an open database, is unknown, which
does not mean unchanged.
"""

from __future__ import annotations

import ast
import builtins
import copy
import copyreg
import datetime
import decimal
import dis
import fractions
import functools
import gc
import inspect
import linecache
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PosixPath, WindowsPath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from aitrain.errors import AitrainError
from aitrain.execution.task import current_task
from aitrain.execution.user_code import is_users_file, own_files

MAX_REFERENCES = 3_000_000
"""Maximum references in a snapshot; comparing two snapshots of this size takes about 0.3 s."""
MAX_SECONDS = 5.0
"""Seconds of comparisons in one watched call."""
MAX_EVENTS = 20_000
"""Traced events of a call that runs beside others, about 6 ms; what it does later shows in the comparison only."""
LOOKS = 3
"""Comparisons after one line, in a call that runs alone."""
MOST_BLOCKS = 1_000
"""Blocks of 624 random numbers that a call may draw; one that draws more is taken for one that seeds the generator."""
LARGE_ARRAY = 1 << 20
"""Bytes of an array above which it is compared at the end of a call only."""

_LEAVES = {
    str, bytes, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice, re.Pattern,
    re.Match, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
    fractions.Fraction, uuid.UUID, Path, PosixPath, WindowsPath, CodeType, FrameType, types.TracebackType,
}  # fmt: skip
"""Types of values that never change and refer to nothing that does."""

_CONTAINERS: frozenset[type] = frozenset((
    list, dict, set, frozenset, tuple, deque, OrderedDict, defaultdict, types.MappingProxyType, types.CellType,
    types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, types.SimpleNamespace, property, staticmethod,
    classmethod, functools.partial, BaseException, super, type({}.keys()), type({}.values()), type({}.items()),
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType, object, FunctionType,
))  # fmt: skip
"""C types whose whole state is what they refer to."""
_COPIED = (list, dict, set, deque, bytearray)

_NOT_WATCHED = (
    "httpx.", "httpcore.", "requests.", "urllib3.", "aiohttp.", "openai.", "anthropic.", "logging.", "_thread.",
    "threading.Condition", "threading.Semaphore", "threading.BoundedSemaphore", "asyncio.locks.", "_contextvars.",
    "_abc.", "_struct.", "importlib.", "_frozen_importlib", "zipimport.", "transformers.", "tokenizers.", "datasets.",
    "pyarrow.", "pydantic_core.", "aitrain.", "numpy.dtype", "numpy.ufunc",
)  # fmt: skip
"""Beginnings of names of types whose objects may change without an effect on scores: clients, loggers, locks,
tokenizers, tables. Objects of classes that users derive from them are watched."""
_HOLD_USERS_CODE = ("aitrain.envs.", "aitrain.environment.judges.judge_set.", "aitrain.environment.adapters.reward.")
"""Beginnings of names of our types that are watched all the same."""

_LRU_CACHE = type(functools.lru_cache(len))
_FRAMES = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
_HEAP_TYPE = 1 << 9


class UnknownStateError(AitrainError):
    """State that cannot be compared; the message says which."""


def _is_users_module(module: object) -> bool:
    """Whether a module is the user's; modules without a file, such as notebooks, are, unless Python contains them."""
    # an alias of transformers imports what may be missing, when it is asked for an attribute
    file, name, path = (inspect.getattr_static(module, name, None) for name in ("__file__", "__name__", "__path__"))
    if file is None:
        return name not in sys.builtin_module_names and path is None
    return is_users_file(file)


@functools.lru_cache(maxsize=1)
def _users_modules(_: int) -> dict[str, ModuleType]:
    """The user's modules, by their names and by the last part of these; the argument is how many modules there are."""
    found = {name: one for name, one in list(sys.modules.items()) if isinstance(one, ModuleType)}
    users = {name: one for name, one in found.items() if "__file__" in vars(one) and _is_users_module(one)}
    return {name.rpartition(".")[2]: one for name, one in users.items()} | users


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    if module is not None and module is not builtins:
        return _is_users_module(module)
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(is_users_file(function.__code__.co_filename) for function in functions)  # made by exec


def _is_not_watched(item: object) -> bool:
    """Whether an object is a client, a logger or another one that may change."""
    name = f"{type(item).__module__}.{type(item).__qualname__}"
    return name.startswith(_NOT_WATCHED) and not name.startswith(_HOLD_USERS_CODE)


def _is_array(item: object) -> bool:
    """Whether an object is an array of numpy."""
    return type(item).__module__ == "numpy" and hasattr(item, "tobytes") and hasattr(item, "dtype")


Called = Mapping[CodeType, dict[str, Any]]
"""Functions that were called, with their global variables."""


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
        called: Called | None = None,
    ) -> None:
        """`through_code`: also classes, and the global variables that functions name."""
        self.seen: dict[int, object] = {}
        self.tracked: list[object] = []
        self.owners: dict[int, object] = {}
        """Objects and modules by the id of their `__dict__`."""
        self.has_caches = False
        """Whether there are caches or weak references, from which other objects may come later."""
        self._namespaces = list[dict[str, Any]]()  # global variables of the user's modules, which are walked by name
        self._names, self._imports = set[str](), set[str]()
        self._is_through_code = through_code
        left = {id(item) for item in (vars(builtins), vars(sys), sys.stdout, sys.stderr, sys.stdin, *without)}
        for code, namespace in (called or {}).items():
            self._names |= _names_in(code)
            self._imports |= _imports_in(code)
            self._add_namespace(namespace)
        todo, count = list(roots), 0
        self._roots = {id(root) for root in todo}
        while todo or (todo := self._named_globals()):
            item = todo.pop()
            if type(item) in _LEAVES or id(item) in self.seen or id(item) in left:
                continue
            self.seen[id(item)] = item
            parts = self._parts(item)
            todo += parts
            count += len(parts)
            if count > MAX_REFERENCES:
                raise UnknownStateError(f"it refers to more than {MAX_REFERENCES:,} objects")

    def __contains__(self, item: object) -> bool:
        return id(item) in self.seen

    def _add_namespace(self, namespace: dict[str, Any]) -> None:
        """Compare these global variables, and walk those that functions name."""
        if self._is_through_code and id(namespace) not in self.owners:
            self.owners[id(namespace)] = sys.modules.get(str(namespace.get("__name__")), builtins)
            self.seen[id(namespace)] = namespace
            self._namespaces.append(namespace)
            self.tracked.append(namespace)

    def _named_globals(self) -> list[object]:
        """Global variables that are named, also of modules that a function imports, and were not walked yet."""
        modules = _users_modules(len(sys.modules))
        for name in self._imports & modules.keys():
            self._add_namespace(vars(modules[name]))
        values = [space[name] for space in self._namespaces for name in self._names if name in space]
        return [value for value in values if type(value) not in _LEAVES and value not in self]

    def _parts(self, item: Any) -> list[Any]:
        """What an object refers to; notes the object if it can be compared."""
        kind = type(item)
        if issubclass(kind, ModuleType):
            if _is_users_module(item):
                self._add_namespace(vars(item))
            return []
        if kind is FunctionType:
            if is_users_file(item.__code__.co_filename):
                self._names |= _names_in(item.__code__)
                self._imports |= _imports_in(item.__code__)
                self._add_namespace(item.__globals__)
            named = (item.__kwdefaults__ or {}).values()
            return [*(item.__closure__ or ()), *(item.__defaults__ or ()), *named, vars(item)]
        if kind is _LRU_CACHE or issubclass(kind, weakref.ReferenceType):
            self.has_caches = True
            return _cached_values(item) if kind is _LRU_CACHE else [weakref.ReferenceType.__call__(item)]
        if isinstance(item, type):
            if not (self._is_through_code and _is_users_class(item)):
                return []
        elif issubclass(kind, threading.Thread) and item.is_alive():
            raise UnknownStateError(f"the thread {item.name}, which the environment started, may change anything")
        elif _is_not_watched(item) and id(item) not in self._roots:
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
        if _is_array(item) and item.dtype.hasobject:
            parts += item.ravel().tolist()
        return parts


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function uses, with those of the functions inside of it."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _imports_in(code: CodeType) -> frozenset[str]:
    """Names of what a function imports, with those of the functions inside of it."""
    inner = [_imports_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    steps = dis.get_instructions(code)
    return frozenset(one.argval for one in steps if one.opname in ("IMPORT_NAME", "IMPORT_FROM")).union(*inner)


def _cached_values(cache: Any) -> list[Any]:
    """The keys and values of an `lru_cache`, and its attributes, without the containers that it keeps them in."""
    parts = gc.get_referents(cache)
    inside = [part for part in parts if isinstance(part, dict) and part is not vars(cache)]
    parts += [value for part in inside for value in part.values() if type(value).__name__ != "_lru_list_elem"]
    return [part for part in parts if not isinstance(part, type) and not any(part is each for each in inside)]


class StateSnapshot:
    """What the mutable objects of an environment refer to or hold at one time; `called` were called by it.

    Raises:
        UnknownStateError: see Walk.
    """

    def __init__(self, environment: Any, called: Called | None = None) -> None:
        _add_hook()
        kinds = [kind for kind in type(environment).__mro__ if _is_users_class(kind)]
        modules = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]
        self.walk = Walk([environment, *kinds, *modules], called=called)
        tracked = self.walk.tracked
        self._dicts: list[dict[Any, Any]] = [item for item in tracked if isinstance(item, dict)]
        self._copies = {id(item): (item, _shallow_copy(item)) for item in tracked if isinstance(item, _COPIED)}
        self._referents = [(item, gc.get_referents(item)) for item in tracked]
        self._flat = self._references()
        self._values: list[tuple[Any, object]] = []
        for item in tracked:
            if not isinstance(item, type) and _c_type(type(item)) not in _CONTAINERS:  # type: ignore[arg-type]
                self._values.append((item, _value(item)))
        self.note_process()

    def _references(self) -> list[object]:
        return gc.get_referents(*self.walk.tracked) + list(chain.from_iterable(map(dict.keys, self._dicts)))

    def is_changed(self, is_mid_call: bool = False) -> bool:
        """Whether anything differs now; in the middle of a call large arrays are left out, and the state of the process
        is compared too."""
        try:
            now = self._references()
        except RuntimeError:  # a call that was abandoned adds to a dict
            return True
        if len(now) != len(self._flat) or not all(map(operator.is_, now, self._flat)):
            return True
        for item, value in self._values:
            is_large = is_mid_call and _is_array(item) and item.nbytes > LARGE_ARRAY
            if not is_large and _value(item) != value:
                return True
        return is_mid_call and self.is_process_changed()

    def changed_objects(self) -> list[object]:
        """The objects that differ now, except in ways that have no effect on scores."""
        changed = [item for item, value in self._values if _value(item) != value]
        for item, before in self._referents:
            if isinstance(item, dict):
                changed += [item] if self._changed_keys(item) else []
            elif len(now := gc.get_referents(item)) != len(before) or not all(map(operator.is_, now, before)):
                changed.append(item)
        return changed

    def _changed_keys(self, item: dict[Any, Any]) -> list[Any]:
        """Keys whose values differ, without those of cached properties and of clients that are made when needed."""
        owner, missing = self.walk.owners.get(id(item)), object()
        _, before = self._copies.get(id(item), (None, {}))
        found = []
        for key in dict.fromkeys([*before, *item]):
            old, new = before.get(key, missing), item.get(key, missing)
            if old is new or (isinstance(owner, ModuleType) and key == "__warningregistry__"):
                continue
            of_class = inspect.getattr_static(type(owner), key, None) if isinstance(key, str) else None
            if old in (missing, None) and (_is_not_watched(new) or isinstance(of_class, functools.cached_property)):
                continue
            found.append(key)
        return found

    def describe(self, item: Any) -> str:
        """A changed object for the user, if no line of code is known."""
        keys = self._changed_keys(item) if isinstance(item, dict) else []
        owner = self.walk.owners.get(id(item), item)
        name = str(getattr(owner, "__name__", type(owner).__name__))
        return f"{name}.{keys[0]}" if keys and owner is not item else f"an object of type {type(item).__name__}"

    def note_process(self) -> None:
        """Note the state that all code of the process shares."""
        self._facts, self._generators = _process_state(), _generator_states()

    def is_process_changed(self) -> bool:
        """Whether the state differs now that all code of the process shares; numbers may be drawn."""
        draws = map(_has_only_drawn, self._generators, _generator_states())
        return _process_state() != self._facts or not all(draws)

    def stored_on(self, frame: FrameType, line: int) -> list[object]:
        """The objects that a line assigns to or deletes from, if other calls see them; without clients."""
        found = []
        for node in _stores(frame.f_code.co_filename).get(line, ()):
            if not isinstance(node, ast.Name):
                name, target = getattr(node, "attr", ""), _object_of(node.value, frame)
            else:
                name, target = node.id, frame.f_globals if node.id in frame.f_code.co_names else None
            values = target if isinstance(target, dict) else getattr(target, "__dict__", {})
            if target is not None and target in self.walk and not (name and _is_not_watched(values.get(name))):
                found.append(target)
        return found

    def restore(self, items: Iterable[object]) -> None:
        """Give those of these objects that have changed the content that they had.

        Raises:
            ValueError: one is no container of items or attributes, and no array.
        """
        wanted = set(map(id, items))
        changed = [item for item in self.changed_objects() if id(item) in wanted]
        arrays: dict[int, Any] = {
            id(item): value for item, value in self._values if _is_array(item) and not item.dtype.hasobject
        }
        others = [item for item in changed if id(item) not in self._copies and id(item) not in arrays]
        if others:
            raise ValueError(f"{self.describe(others[0])} cannot be put back as it was")
        for item in changed:
            known: Any = item
            if id(item) in arrays:
                shape, _, content = arrays[id(item)]
                known[...] = sys.modules["numpy"].frombuffer(content, known.dtype).reshape(shape)
                continue
            _, before = self._copies[id(item)]
            known.clear()
            (known.update if isinstance(item, (dict, set)) else known.extend)(before)


def _shallow_copy(item: Any) -> Any:
    """A copy by the C type's own method, which calls no code of the user."""
    return next(kind for kind in _COPIED if isinstance(item, kind)).copy(item)


def _value(item: Any) -> object:
    """What an object of a C type holds apart from references, as a value that can be compared.

    Raises:
        UnknownStateError: it does not say.
    """
    kind = type(item)
    if kind in _FRAMES:
        frame = getattr(item, _FRAMES[kind])
        return frame and frame.f_lasti
    if _is_array(item):
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
        raise UnknownStateError(f"an object of {kind.__module__}.{kind.__qualname__} does not show its state")
    return first


def _plain(part: Any, depth: int = 0) -> object:
    """A reduced object with its new containers as tuples, and other objects by their ids."""
    if depth < 6 and isinstance(part, (tuple, list)):
        return tuple(_plain(each, depth + 1) for each in part)
    if depth < 6 and isinstance(part, dict):
        return tuple((_plain(key, depth + 1), _plain(value, depth + 1)) for key, value in part.items())
    if _is_array(part):
        return part.tobytes()
    return part if type(part) in _LEAVES else id(part)


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


def _process_state() -> list[object]:
    """State that all code of the process shares."""
    state: list[object] = [dict(os.environ), sys.stdin, sys.stdout, sys.stderr, sys.argv[:], sys.getrecursionlimit()]
    with suppress(FileNotFoundError):  # the folder was deleted
        state.append(os.getcwd())
    return state


_Twister = tuple[int, ...]
"""The state of a Mersenne Twister: the key of a block of numbers, and how many of them were drawn."""


def _generator_states() -> list[_Twister]:
    """The states of the global random generators of Python and numpy."""
    states = [random.getstate()[1]]
    if get_state := getattr(sys.modules.get("numpy.random"), "get_state", None):  # it may be half imported
        state = get_state(legacy=False)["state"]
        if "pos" in state:  # of a Mersenne Twister, which numpy begins with
            states.append((*state["key"].tolist(), state["pos"]))
    return states


def _has_only_drawn(before: _Twister, now: _Twister) -> bool:
    """Whether numbers were drawn from a generator, at most MOST_BLOCKS blocks, and it was not seeded."""
    if before[:-1] == now[:-1]:
        return before[-1] <= now[-1]
    follower = random.Random()
    follower.setstate((3, before, None))
    for _ in range(MOST_BLOCKS):
        follower.getrandbits(32 * len(before[:-1]))
        if follower.getstate()[1][:-1] == now[:-1]:
            return True
    return False


# -- assignments


@functools.lru_cache(maxsize=256)
def _stores(file: str) -> dict[int, list[ast.Name | ast.Attribute | ast.Subscript]]:
    """The global variables, attributes and items that each line of a file assigns to or deletes."""
    found = defaultdict[int, list[ast.Name | ast.Attribute | ast.Subscript]](list)
    tree = ast.Module([], [])
    with suppress(SyntaxError):  # of a notebook
        tree = ast.parse("".join(linecache.getlines(file)))
    nodes = list(ast.walk(tree))
    names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    for node in nodes:
        is_written = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if is_written and (isinstance(node, (ast.Attribute, ast.Subscript)) or getattr(node, "id", None) in names):
            found[node.lineno].append(node)  # type: ignore[attr-defined, arg-type]
    return found


def _object_of(node: ast.expr, frame: FrameType) -> Any:
    """The object that an expression leads to, without running code of the user: an item stands for what holds it; None
    if it cannot be found."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Subscript):
        return _object_of(node.value, frame)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _object_of(node.value, frame)
    if node.attr == "__dict__":
        return getattr(owner, "__dict__", None)
    found = inspect.getattr_static(owner, node.attr, None)
    return None if hasattr(type(found), "__get__") else found


# -- files

_watched: ContextVar[tuple[StateWatch, object] | None] = ContextVar("watched", default=None)
"""The watch of the present call, and its episode."""
_watched_alone: tuple[StateWatch, object] | None = None
"""Those of a call that runs alone, whose threads write files as well."""


@functools.cache
def _add_hook() -> None:
    """Note which files are written, from now on: an audit hook cannot be removed."""
    sys.addaudithook(_note_file)


_PATHS = {
    "open": (0,),
    "sqlite3.connect": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
}
"""Events that may change what a name stands for, with the places of the paths."""


def _note_file(event: str, given: tuple[Any, ...]) -> None:
    places = _PATHS.get(event)
    if places is None or (watched := _watched.get() or _watched_alone) is None:
        return
    (watch, episode), paths = watched, [given[place] for place in places]
    if not all(isinstance(path, (str, bytes, os.PathLike)) for path in paths):
        return
    names = [os.fsdecode(path) for path in paths]
    if event == "sqlite3.connect":
        names = [file for file in map(_database_file, names) if file]
    names = [name for name in map(os.path.abspath, names) if name not in own_files]
    if event == "sqlite3.connect":  # whether it is written shows at the end of the call
        for name in names:
            watch.databases.setdefault(episode, {}).setdefault(name, _stamp(name))
        return
    if event == "open":
        flags = given[2]
        is_written = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_APPEND
        # `tempfile` opens a file in a folder as if it were the folder
        names = [name for name in names if not (name.startswith("/dev/") or os.path.isdir(name))]
        for name in names:
            if flags & os.O_APPEND:
                watch.appended.setdefault(name, []).append(episode)
            if name in watch.appended and not flags & os.O_WRONLY:  # else it is a log
                for other in (*watch.appended[name], episode):
                    watch.wrote(name, other)
    else:  # what is there, by a path that is not relative to an open folder
        is_there = event in ("os.link", "os.symlink") or os.path.lexists(paths[0])
        is_written = is_there and (event == "os.truncate" or given[-1] == -1)
    for name in names if is_written else ():
        watch.wrote(name, episode)


def _database_file(name: str) -> str:
    """The file of a database, which may be given as an address; empty if it is only its connection's."""
    if name.startswith("file:") and not os.path.exists(name):
        address = urlsplit(name)
        name = "" if "mode=memory" in address.query else unquote(address.path)
    return "" if name == ":memory:" else name


def _stamp(database: str) -> list[tuple[int, int]]:
    """Time and size of a database's file and of the log that SQLite writes first, as far as they hold anything."""
    stats = []
    for file in (database, f"{database}-wal"):
        with suppress(OSError):
            stats.append(os.stat(file))
    return [(stat.st_mtime_ns, stat.st_size) for stat in stats if stat.st_size]


# -- the watch


class StateWatch:
    """What the watched calls of one environment changed. `by_episode`: all changes are wanted; otherwise the first one
    ends the watch."""

    def __init__(self, environment: Any, by_episode: bool = False) -> None:
        self.environment, self.by_episode = environment, by_episode
        self.clear()
        self._called: dict[CodeType, dict[str, Any]] = {}
        self._unseen: dict[CodeType, set[int]] = {}  # lines that no watched call has reached
        self.files: dict[str, object] = {}
        """The files that watched calls wrote, with their episodes; one that two of them wrote is a change."""
        self.appended: dict[str, list[object]] = {}
        """The files that watched calls appended to, each with those episodes; one that is read counts as
        written by it and by the reader."""
        self.databases: dict[object, dict[str, list[tuple[int, int]]]] = {}
        """The databases that the calls of an episode opened, with their stamps."""

    def clear(self) -> None:
        """Forget the changes, and not which lines were reached."""
        self.before: StateSnapshot | None = None
        """What was before the call that runs alone, or the calls that run at the same time."""
        self.change, self.changed = "", list[Any]()
        """The first change in words, and all objects that were changed."""
        self.unknown = ""
        """Why it cannot be known what calls change; empty if it can."""
        self.first: StateSnapshot | None = None
        """What was before the first change."""
        self.is_of_process = False
        """Whether something changed that no copy of an environment separates: the process's state, or a file."""

    @property
    def is_changed(self) -> bool:
        """Whether calls change something, or that cannot be known."""
        return bool(self.change or self.unknown)

    @property
    def reason(self) -> str:
        """The beginning of a sentence that says what changes, or why that cannot be known."""
        name = type(self.environment).__name__
        if not self.change:
            return f"What calls of {name} change cannot be known: {self.unknown}"
        return f"A call of {name} changes what other calls see: {self.change}"

    def look_before(self) -> bool:
        """Note what is now; returns whether it can be compared."""
        self.before = None
        try:
            self.before = StateSnapshot(self.environment, self._called)
        except UnknownStateError as error:
            self.unknown = self.unknown or str(error)
        except Exception as error:  # of a class of the user's, such as a property __dict__
            self.unknown = self.unknown or f"{type(error).__name__}: {error}"
        return self.before is not None

    def note(self, place: str = "", is_alone: bool = False, is_mid_call: bool = False) -> bool:
        """Note what differs from what was before, in the middle of a call also in the state of the process; returns
        whether anything does that matters."""
        assert self.before is not None
        objects, before = self.before.changed_objects(), self.before
        is_of_process = is_mid_call and before.is_process_changed()
        is_changed = bool(objects) or is_of_process
        if is_changed:
            self.add(place or ", ".join(map(before.describe, objects[:1])), objects, is_of_process)
        if is_alone:  # the next change is another one
            self.look_before()
        return is_changed

    def add(self, change: str, objects: list[object], is_of_process: bool = False) -> None:
        """Note a change in words, and the objects that it is of."""
        self.first = self.first or self.before
        self.is_of_process |= is_of_process
        self.change = self.change or change
        self.changed += objects

    def wrote(self, file: str, episode: object) -> None:
        """Note that a call of an episode wrote a file, unless it is a lock by which calls wait for each other."""
        if not file.endswith(".lock") and self.files.setdefault(file, episode) is not episode:
            self.add(f"the file {Path(file).name}", [], is_of_process=True)

    def note_databases(self, episode: object) -> None:
        """Note the databases of an episode that were written until the end of a call."""
        opened = self.databases.get(episode, {})
        for file, before in [*opened.items()]:
            opened[file] = _stamp(file)
            if opened[file] != before:
                self.wrote(file, episode)

    def unseen_lines(self, code: CodeType) -> set[int]:
        """Lines of a function that no watched call has reached."""
        if code not in self._unseen:
            self._unseen[code] = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        return self._unseen[code]

    def begins(self, frame: FrameType) -> bool:
        """Note a function that is called; returns whether it may refer to what is not compared yet."""
        self._called.setdefault(frame.f_code, frame.f_globals)
        return self.before is not None and frame.f_globals not in self.before.walk

    def is_users(self, frame: FrameType) -> bool:
        """Whether a function is the user's, or is in the file of a class of the environment."""
        file = frame.f_code.co_filename
        if file.startswith("<"):  # made by `exec`, as dataclasses make methods
            module = sys.modules.get(str(frame.f_globals.get("__name__")))
            return module is None or module is builtins or _is_users_module(module)
        return is_users_file(file) or file in self._files_of_classes

    @functools.cached_property
    def _files_of_classes(self) -> set[str]:
        modules = [sys.modules.get(kind.__module__) for kind in type(self.environment).__mro__]
        files = {str(getattr(module, "__file__", "")) for module in modules}
        return {file for file in files if "site-packages" in file}


_TRACE_LOCK = threading.Lock()


@contextmanager
def watching_files(watch: StateWatch, episode: object, is_alone: bool) -> Iterator[None]:
    """Context of a call in which the files that it writes are those of an episode."""
    global _watched_alone
    token = _watched.set((watch, episode))
    if is_alone:
        _watched_alone = watch, episode
    try:
        yield
    finally:
        watch.note_databases(episode)
        _watched.reset(token)
        if is_alone:
            _watched_alone = None


def set_trace(tracer: CallTracer | None) -> None:
    """Set the trace function of the calling thread. Python does not allow two threads to do so at the same time."""
    with _TRACE_LOCK:
        before = sys.gettrace()  # freed after it was replaced
        sys.settrace(tracer)
    del before


class CallTracer:
    """Traces one call, and compares after each line of the user's code; while others run, after the lines that no call
    has reached before."""

    def __init__(self, watch: StateWatch, is_alone: bool) -> None:
        self.watch, self.is_alone, self._has_ended = watch, is_alone, False
        self._looks: dict[tuple[CodeType, int], int] = {}
        self._events, self._seconds, self._place = 0, 0.0, ""
        self._task = current_task.get()
        if is_alone:
            watch.look_before()

    def begin_on_loop(self) -> None:
        """Trace the calling thread, which is that of the `async def` methods of all calls."""
        set_trace(self)

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, or was abandoned and still runs."""
        return self._has_ended or (self._task is not None and self._task.abandoned is not None)

    def end(self) -> None:
        """Compare at the end of a call that runs alone, unless it was abandoned."""
        is_over, self._has_ended = self.is_over, True
        if not is_over:
            self.look(self._place, at_end=True)

    def __call__(self, frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        """Trace a frame of the user's code."""
        code, watch = frame.f_code, self.watch
        if self._is_spent() or not watch.is_users(frame):
            return None
        unseen = watch.unseen_lines(code)
        if self.is_alone and watch.begins(frame):
            self.look(self._place)
            watch.look_before()
        elif not (self.is_alone or unseen):
            return None
        line = 0 if frame.f_lineno == code.co_firstlineno else frame.f_lineno  # of a generator that is resumed
        is_new = False

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            nonlocal line, is_new
            if self._is_spent():
                return None
            looks = self._looks[code, line] = self._looks.get((code, line), 0) + 1
            if line and event != "exception" and (looks <= LOOKS if self.is_alone else is_new):
                file = code.co_filename
                self._place = f"{linecache.getline(file, line).strip()[:80]} ({Path(file).name}, line {line})"
                self.look(self._place, frame, line)
            if event == "line":
                line, is_new = frame.f_lineno, frame.f_lineno in unseen
                unseen.discard(line)
                if is_new and watch.before is not None:
                    watch.before.note_process()  # other calls may have drawn, and libraries set variables
            return trace

        return trace

    def _is_spent(self) -> bool:
        """Count an event; whether it is the last one that is traced."""
        self._events += not self.is_alone
        is_spent = self.is_over or self._events > MAX_EVENTS
        if is_spent:
            set_trace(None)
        return is_spent

    def look(self, place: str, frame: FrameType | None = None, line: int = 0, at_end: bool = False) -> None:
        """Compare with what was before, after a line of a function or at the end of the call."""
        watch, start = self.watch, time.perf_counter()
        if watch.before is None or (watch.is_changed and not (self.is_alone and watch.by_episode)):
            return  # the verdict is known
        if self._seconds > MAX_SECONDS and not at_end:
            return
        try:
            is_mid_call = not at_end
            is_noted = watch.before.is_changed(is_mid_call) and watch.note(place, self.is_alone, is_mid_call)
            if frame is not None and watch.before is not None and not is_noted:
                # also of an equal value, as it may be another value in other calls
                stored = watch.before.stored_on(frame, line)
                if stored:
                    watch.add(place, stored)
        except Exception as error:  # it must not get into the user's code
            watch.unknown = watch.unknown or str(error) or type(error).__name__
        self._seconds += time.perf_counter() - start
        if self._seconds > MAX_SECONDS and self.is_alone and not at_end:
            watch.unknown = watch.unknown or f"comparing what it refers to takes more than {MAX_SECONDS:g} s"


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
        found = dict[str, set[int]]()  # the ids of the targets below each attribute
        for name, value in vars(environment).items():
            walk = Walk([value], without=[vars(environment)], through_code=False)
            found[name] = {id(item) for item in targets if item in walk}
        if not {id(item) for item in targets if item is not environment} <= set().union(*found.values()):
            raise ValueError("it is not below the environment")
        plan = cls(frozenset(name for name, below in found.items() if below))
        try:
            copied = Walk(vars(plan.copy_of(environment)).values(), through_code=False)
        except Exception as error:
            raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:100]) from error
        if any(item in copied for item in targets):
            raise ValueError("a copy of the environment still refers to it")
        return plan
