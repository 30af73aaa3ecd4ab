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
import linecache
import operator
import os
import pickle
import random
import re
import sys
import threading
import time
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path, PosixPath, WindowsPath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

from aitrain.execution.task import current_task
from aitrain.execution.user_code import own_files
from aitrain.packages import is_users_file

MAX_OBJECTS = 1_000_000
"""Maximum objects in a snapshot; comparing two snapshots of this size takes about 0.3 s."""
MAX_SECONDS = 5.0
"""Seconds of comparisons in one watched call."""
MAX_EVENTS = 20_000
"""Traced events of a call that runs beside others, about 6 ms; what it does later shows in the comparison only."""
LOOKS = 3
"""Comparisons after one line: of each call that runs alone, and then of all calls that run at the same time."""
MOST_BLOCKS = 1_000
"""Blocks of 624 random numbers that a call may draw; one that draws more is taken for one that seeds the generator."""
_LEAVES = {
    str, bytes, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice, re.Pattern,
    re.Match, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
    fractions.Fraction, uuid.UUID, Path, PosixPath, WindowsPath, CodeType, FrameType, types.TracebackType,
}  # fmt: skip
"""Types of values that never change and refer to nothing that does."""

_CONTAINERS: frozenset[type] = frozenset((
    list, dict, set, frozenset, tuple, deque, OrderedDict, defaultdict, types.MappingProxyType, types.CellType,
    types.MethodType, types.BuiltinFunctionType, property, staticmethod, classmethod, functools.partial, BaseException,
    types.SimpleNamespace,
    type({}.keys()), type({}.values()), type({}.items()), types.GetSetDescriptorType, object, FunctionType,
))  # fmt: skip
"""C types whose whole state is what they refer to."""
_COPIED = (list, dict, set, deque)

_NOT_WATCHED = (
    "httpx.", "httpcore.", "requests.", "urllib3.", "aiohttp.", "openai.", "anthropic.", "logging.", "_thread.",
    "threading.Condition", "threading.Semaphore", "threading.BoundedSemaphore", "asyncio.locks.", "_contextvars.",
    "_abc.", "_struct.", "importlib.", "_frozen_importlib", "zipimport.", "transformers.", "tokenizers.", "datasets.",
    "pyarrow.", "pydantic_core.", "aitrain.", "numpy.dtype", "numpy.ufunc", "functools._lru_list_elem", "_json.",
    "pandas._libs.", "pandas.core.indexes.", "pandas.Index", "pandas.RangeIndex", "pandas.MultiIndex",
)  # fmt: skip
"""Beginnings of names of types whose objects may change without an effect on scores: clients, loggers, locks,
tokenizers, tables. Objects of classes that users derive from them are watched."""
_HOLD_USERS_CODE = ("aitrain.envs.", "aitrain.environment.judges.judge_set.", "aitrain.environment.adapters.reward.")
"""Beginnings of names of our types that are watched all the same."""

_LRU_CACHE = type(functools.lru_cache(len))
_HEAP_TYPE = 1 << 9


def _is_users_module(module: ModuleType) -> bool:
    """Whether a module is the user's; modules without a file, such as notebooks, are, unless Python contains them."""
    names = vars(module)  # an alias of transformers imports what may be missing, when it is asked for an attribute
    if names.get("__file__") is None:
        return names.get("__name__") not in sys.builtin_module_names and "__path__" not in names
    return is_users_file(names["__file__"])


def _is_users_name(name: object) -> bool:
    """Whether a module of this name is the user's; what `exec` made may have the name of no module, or of builtins."""
    module = sys.modules.get(str(name))
    return module is None or module is builtins or _is_users_module(module)


def _type_name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _is_not_watched(item: object) -> bool:
    """Whether an object is a client, a logger or another one that may change."""
    name = _type_name(item)
    return name.startswith(_NOT_WATCHED) and not name.startswith(_HOLD_USERS_CODE)


def _is_array(item: object) -> bool:
    """Whether an object is an array of numpy."""
    return _type_name(item) == "numpy.ndarray"


class Walk:
    """The objects that some roots refer to, however deep, as far as calls may change them.

    Raises:
        ValueError: there are too many, or one cannot be compared.
    """

    def __init__(self, roots: Iterable[object], without: Iterable[object] = (), through_code: bool = True) -> None:
        """`through_code`: also classes, and the modules of functions."""
        self.seen: dict[int, object] = {}
        self.tracked: list[Any] = []
        self.has_caches = False
        """Whether there are caches or weak references, from which other objects may come later."""
        self._is_through_code = through_code
        self._left = {id(item) for item in (vars(builtins), vars(sys), sys.stdout, sys.stderr, sys.stdin, *without)}
        todo = list(roots)
        self._roots = set(map(id, todo))
        while todo:
            item = todo.pop()
            if type(item) in _LEAVES or id(item) in self.seen or id(item) in self._left:
                continue
            self.seen[id(item)] = item
            todo += self._parts(item)
            if len(self.seen) > MAX_OBJECTS:
                raise ValueError(f"it refers to more than {MAX_OBJECTS:,} objects")

    def __contains__(self, item: object) -> bool:
        return id(item) in self.seen

    def _namespace(self, names: dict[str, Any]) -> dict[str, Any]:
        """Global variables, without those of the import system and of `warnings`."""
        names.setdefault("__warningregistry__", {})
        self._left.update(id(value) for name, value in list(names.items()) if name.startswith("__"))
        return names

    def _parts(self, item: Any) -> list[Any]:
        """What an object refers to; notes the object if it can be compared."""
        kind = type(item)
        if issubclass(kind, ModuleType):
            return [self._namespace(vars(item))] if self._is_through_code and _is_users_module(item) else []
        if kind is FunctionType:
            parts = [item.__closure__, item.__defaults__, item.__kwdefaults__, vars(item)]
            if self._is_through_code and is_users_file(item.__code__.co_filename):
                parts += [self._namespace(item.__globals__), *_imported(item.__code__)]
            return parts
        if kind is _LRU_CACHE or issubclass(kind, weakref.ReferenceType):
            self.has_caches = True
            return _cached_values(item) if kind is _LRU_CACHE else [weakref.ReferenceType.__call__(item)]
        if isinstance(item, type):
            if not (self._is_through_code and item.__flags__ & _HEAP_TYPE and _is_users_name(item.__module__)):
                return []
            copyreg._slotnames(item)  # type: ignore[attr-defined]  # a copy of an instance notes them in its class
        elif issubclass(kind, threading.Thread) and item.is_alive():
            raise ValueError(f"the thread {item.name}, which the environment started, may change anything")
        elif _is_not_watched(item) and id(item) not in self._roots:
            return []
        with suppress(AttributeError, TypeError):
            object.__getattribute__(item, "__dict__")  # a dict from now on, which can be compared
        self.tracked.append(item)
        if _type_name(item).startswith("numpy.random."):  # compared as pickled, without the C pointers it refers to
            return []
        parts = gc.get_referents(item)
        if not self._is_through_code:
            parts = [part for part in parts if not isinstance(part, type)]
        if _is_array(item) and item.dtype.hasobject:
            parts += item.ravel().tolist()
        return parts


def _imported(code: CodeType) -> list[ModuleType]:
    """The user's modules that a function may import, by the last part of their names, with those of inner functions."""
    found = [module for each in code.co_consts if isinstance(each, CodeType) for module in _imported(each)]
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        last = {name.rpartition(".")[2] for name in code.co_names}
        loaded = [module for name, module in list(sys.modules.items()) if name.rpartition(".")[2] in last]
        found += [
            module for module in loaded if "__file__" in getattr(module, "__dict__", ()) and _is_users_module(module)
        ]
    return found


def _cached_values(cache: Any) -> list[Any]:
    """The keys and values of an `lru_cache`, and its attributes, without the dict that it keeps them in."""
    parts = gc.get_referents(cache)
    # its own dict comes after the keys and values, which may be dicts, too
    last = max(place for place, part in enumerate(parts) if type(part) is dict and part is not vars(cache))
    return [*parts[:last], *parts[last].values(), *parts[last + 1 :]]


class StateSnapshot(Walk):
    """What the mutable objects of an environment refer to or hold at one time; `called` were called by it.

    Raises:
        ValueError: see Walk.
    """

    def __init__(self, environment: Any, called: Iterable[dict[str, Any]] = ()) -> None:
        _add_hook()
        super().__init__([environment, *called])
        tracked = self.tracked
        self._dicts = [item for item in tracked if isinstance(item, dict)]
        self._contents = [(item, _content(item)) for item in tracked]
        self._copies = {
            id(item): _shallow_copy(item) for item in tracked if isinstance(item, _COPIED) or _is_array(item)
        }
        self._values = [(item, _value(item)) for item in tracked if not _is_container(item)]
        self._flat = self._references()
        self.note_process()

    def _references(self) -> list[object]:
        return gc.get_referents(*self.tracked) + list(chain.from_iterable(map(dict.keys, self._dicts)))

    def changed_objects(self) -> list[object]:
        """The objects that differ now."""
        changed = [item for item, value in self._values if _value(item) != value]
        if not _same(self._references(), self._flat):
            changed += [item for item, before in self._contents if not _same(_content(item), before)]
        return changed

    def describe(self, item: Any) -> str:
        """A changed object for the user, if no line of code is known."""
        if isinstance(item, dict):
            before, missing = self._copies[id(item)], object()
            for key in {**before, **item}:
                if before.get(key, missing) is not item.get(key, missing):
                    return str(key)
        return f"an object of type {type(item).__name__}"  # or the order of a dict

    def note_process(self) -> None:
        """Note the state that all code of the process shares."""
        self._streams, self._generators = _streams(), _generator_states()

    def is_process_changed(self) -> bool:
        """Whether the state differs now that all code of the process shares; numbers may be drawn."""
        draws = map(_has_only_drawn, self._generators, _generator_states())
        return _streams() != self._streams or not all(draws)

    def stored_on(self, frame: FrameType, line: int) -> list[object]:
        """The objects that a line assigns to or deletes from, if other calls see them."""
        targets = list[object]()
        for node in _stores(frame.f_code.co_filename).get(line, ()):
            if not isinstance(node, ast.Name):
                targets.append(_object_of(node.value, frame))
            elif node.id in frame.f_code.co_names and node.id not in frame.f_locals:
                targets.append(frame.f_globals)
        return [target for target in targets if target in self]

    def restore(self) -> None:
        """Give what has changed the content that it had.

        Raises:
            ValueError: something is no container of items or attributes, and no array.
        """
        changed: list[Any] = self.changed_objects()
        for item in changed:
            if id(item) not in self._copies:
                raise ValueError(f"{self.describe(item)} cannot be put back as it was")
        for item in changed:
            if _is_array(item):
                item[...] = self._copies[id(item)]
            else:
                item.clear()
                (item.update if isinstance(item, (dict, set)) else item.extend)(self._copies[id(item)])


def _same(now: list[object], before: list[object]) -> bool:
    """Whether both have the same objects; none is asked whether it is equal."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _content(item: object) -> list[object]:
    """What an object refers to, with the keys of a dict, which are not among them if they are strings."""
    return gc.get_referents(item) + (list(dict.keys(item)) if isinstance(item, dict) else [])


def _shallow_copy(item: Any) -> Any:
    """A copy by the C type's own method, which calls no code of the user."""
    return item.copy() if _is_array(item) else next(kind for kind in _COPIED if isinstance(item, kind)).copy(item)


def _value(item: object) -> bytes:
    """What an object of a C type holds apart from references, in a form that can be compared.

    Raises:
        ValueError: it does not say.
    """
    try:
        return pickle.dumps(item)
    except Exception:
        raise ValueError(f"an object of {_type_name(item)} does not show its state") from None


def _is_container(item: object) -> bool:
    """Whether the whole state of an object is what it refers to."""
    return isinstance(item, type) or _c_type(type(item)) in _CONTAINERS  # type: ignore[arg-type]


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


def _streams() -> list[object]:
    return [sys.stdin, sys.stdout, sys.stderr, sys.argv[:]]


_Twister = tuple[int, ...]
"""The state of a Mersenne Twister: the key of a block of numbers, and how many of them were drawn."""


def _generator_states() -> list[_Twister]:
    """The states of the global random generators of Python and numpy."""
    states = [random.getstate()[1]]
    if get_state := getattr(sys.modules.get("numpy.random"), "get_state", None):  # it may be half imported
        state = get_state(legacy=False)["state"]  # of a Mersenne Twister, unless it was replaced: then it is unknown
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

_Target: TypeAlias = ast.Name | ast.Attribute | ast.Subscript


@functools.lru_cache(maxsize=256)
def _stores(file: str) -> dict[int, list[_Target]]:
    """The variables, attributes and items that each line of a file assigns to or deletes."""
    found = defaultdict[int, list[_Target]](list)
    with suppress(SyntaxError):  # of a notebook
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(node, _Target) and not isinstance(node.ctx, ast.Load):
                found[node.lineno].append(node)
    return found


def _object_of(node: ast.expr, frame: FrameType) -> Any:
    """The object that an expression leads to: an item stands for what holds it; None if it cannot be found."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Subscript):
        return _object_of(node.value, frame)
    return getattr(_object_of(node.value, frame), node.attr, None) if isinstance(node, ast.Attribute) else None


# -- files

_watched: ContextVar[CallTracer | None] = ContextVar("watched", default=None)
"""The tracer of the present call."""
_watched_alone: CallTracer | None = None
"""That of a call that runs alone, whose threads write files as well."""


@functools.cache
def _add_hook() -> None:
    """Note which files and variables are written, from now on: an audit hook cannot be removed."""
    sys.addaudithook(_note_event)


_PATHS = {
    "open": (0,),
    "sqlite3.connect": (0,),
    "os.rename": (0, 1),
    "os.truncate": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
}
"""Events that may change what a path stands for, with the places of the paths."""
_OWN_VARIABLES = (b"AITRAIN_ENDPOINT_KEY", b"NO_PROXY")
"""Variables that aitrain sets for clients of an episode's address, for all episodes to the same."""


def _note_event(event: str, given: tuple[Any, ...]) -> None:
    tracer = _watched.get() or _watched_alone
    if tracer is None:
        return
    watch = tracer.watch
    if event == "os.chdir":
        watch.add("the working directory")
    elif event in ("os.putenv", "os.unsetenv"):
        is_changed = os.environb.get(given[0]) != (*given, None)[1]
        if is_changed and given[0].upper() not in _OWN_VARIABLES:
            watch.add(f"os.environ[{os.fsdecode(given[0])!r}]")
    for place in _PATHS.get(event, ()):
        if not isinstance(given[place], (str, bytes, os.PathLike)):  # an open file
            continue
        path, is_written = os.fsdecode(given[place]), True
        if event == "open":  # `tempfile` opens a file in a folder as if it were the folder
            is_written = (
                given[2] & (os.O_WRONLY | os.O_RDWR) and not path.startswith("/dev/") and not os.path.isdir(path)
            )
        elif event == "sqlite3.connect":  # which does not say whether it will write
            is_written = not any(text in path for text in (":memory:", "mode=memory", "mode=ro"))
        elif event != "os.truncate":
            is_written = given[-1] == -1  # else relative to an open folder
        if is_written:
            watch.wrote(os.path.abspath(path), tracer.episode)


# -- the watch


class StateWatch:
    """What the watched calls of one environment change; the first change ends the watch."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._called: dict[int, dict[str, Any]] = {}  # the global variables of functions
        self.looks: dict[CodeType, dict[int, int]] = {}
        """How often the state is still to be compared after each line of a function."""
        self.files: dict[str, object] = {}
        """The files that watched calls wrote, with their episodes; one that two of them wrote is a change."""
        self.clear()

    def clear(self) -> None:
        """Forget the change."""
        self.before: StateSnapshot | None = None
        """What was before the call that runs alone, or the calls that run at the same time."""
        self.reason, self.objects = "", list[Any]()
        """The beginning of a sentence that says what calls change, or why that cannot be known, and the objects that
        were changed; empty if nothing is."""
        self.is_separable = True
        """Whether a copy of the environment may separate episodes: it is known what changed, and that is no file and no
        state of the process."""

    def changes(self) -> list[object]:
        """The objects that differ from what was before; if that cannot be known, the watch is given up."""
        try:
            return [] if self.before is None else self.before.changed_objects()
        except Exception as error:  # also of a class of the user's
            self.give_up(error)
            return []

    def compare(self) -> None:
        """Note what differs from what was before, without a line of code."""
        if self.before is None or self.reason or not (objects := self.changes()):
            return
        try:
            self.add(self.before.describe(objects[0]), objects, is_separable=True)
        except Exception as error:  # of a class of the user's
            self.give_up(error)

    def look_before(self) -> None:
        """Note what is now, unless something has changed."""
        if not self.reason:
            try:
                self.before = StateSnapshot(self.environment, self._called.values())
            except Exception as error:  # also of a class of the user's, such as a property __dict__
                self.give_up(error)

    def add(self, change: str, objects: Sequence[object] = (), is_separable: bool = False) -> None:
        """Note a change in words, and the objects that it is of."""
        name = type(self.environment).__name__
        self.reason = self.reason or f"A call of {name} changes what other calls see: {change}"
        self.objects += objects
        self.is_separable &= is_separable

    def give_up(self, why: object) -> None:
        """Note why it cannot be known what calls change."""
        name, why = type(self.environment).__name__, str(why) or type(why).__name__
        self.reason = self.reason or f"What calls of {name} change cannot be known: {why}"
        self.is_separable = False

    def wrote(self, file: str, episode: object) -> None:
        """Note that a call of an episode wrote a file, unless it is one of aitrain's, or a lock by which calls wait."""
        is_own = file.endswith(".lock") or file in own_files
        if not is_own and self.files.setdefault(file, episode) is not episode:
            self.add(f"the file {Path(file).name}")

    def begins(self, frame: FrameType) -> bool:
        """Note the module of a function that is called; returns whether it may refer to what is not compared yet. The
        code of an answer, which `exec` runs, has variables of its own."""
        names = frame.f_globals
        if getattr(sys.modules.get(names.get("__name__", "")), "__dict__", None) is not names:
            return False
        self._called[id(names)] = names
        return self.before is not None and names not in self.before

    def is_users(self, frame: FrameType) -> bool:
        """Whether a function is the user's, or is in the file of a class of the environment."""
        file = frame.f_code.co_filename
        if file.startswith("<"):  # made by `exec`, as dataclasses make methods
            return _is_users_name(frame.f_globals.get("__name__"))
        return is_users_file(file) or file in self._files_of_classes

    @functools.cached_property
    def _files_of_classes(self) -> set[str | None]:
        return {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(self.environment).__mro__}


_TRACE_LOCK = threading.Lock()


def set_trace(tracer: CallTracer | None) -> None:
    """Set the trace function of the calling thread. Python does not allow two threads to do so at the same time."""
    with _TRACE_LOCK:
        before = sys.gettrace()  # freed after it was replaced
        sys.settrace(tracer)
    del before


class CallTracer:
    """Context of a call that is watched: traces it, and compares after each line of the user's code; while others run,
    after the lines that calls have hardly reached before.

    The files that it writes are those of its episode; without one, of the call. If it runs alone, its threads are
    traced, too.
    """

    def __init__(self, watch: StateWatch, is_alone: bool, episode: object = None) -> None:
        self.watch, self.is_alone, self.has_ended = watch, is_alone, False
        self.episode = episode or self
        self._events, self._seconds, self._place = 0, 0.0, "something before its first line"
        self._task = current_task.get()

    def __enter__(self) -> None:
        global _watched_alone
        if self.is_alone:
            self.watch.looks.clear()
            self.watch.look_before()
            _watched_alone = self
            threading.settrace(self)
        self._token = _watched.set(self)
        set_trace(self)

    def __exit__(self, *_: object) -> None:
        global _watched_alone
        set_trace(None)
        _watched.reset(self._token)
        if self.is_alone:
            if _watched_alone is self:  # and not that of another environment
                _watched_alone = None
            self.leave_threads()
            is_over, self.has_ended = self.is_over, True
            if not is_over:
                self.watch.compare()

    def begin_on_loop(self) -> None:
        """Trace the calling thread, which is that of the `async def` methods of all calls."""
        set_trace(self)

    def leave_threads(self) -> None:
        """Trace no thread that starts from now on."""
        if threading.gettrace() is self:  # and not that of another environment, whose call began meanwhile
            threading.settrace(None)

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, or was abandoned and still runs."""
        return self.has_ended or (self._task is not None and self._task.abandoned is not None)

    def __call__(self, frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        """Trace a frame of the user's code."""
        code, watch = frame.f_code, self.watch
        if self._is_spent() or not watch.is_users(frame):
            return None
        if self.is_alone and watch.begins(frame):
            self.look()
            watch.look_before()
        if code not in watch.looks:
            watch.looks[code] = dict.fromkeys((line for _, _, line in code.co_lines() if line), LOOKS)
        looks, line = watch.looks[code], 0
        if not any(looks.values()):
            return None

        def reach(frame: FrameType) -> None:
            nonlocal line
            line = frame.f_lineno
            if looks.get(line, 0) > 0 and watch.before is not None and not self.is_alone:
                watch.before.note_process()  # other calls may have drawn, and libraries set variables

        if frame.f_lineno != code.co_firstlineno:  # a generator that is resumed
            reach(frame)

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            if self._is_spent():
                return None
            if looks.get(line, 0) > 0 and event != "exception":
                looks[line] -= 1
                file = code.co_filename
                self._place = f"{linecache.getline(file, line).strip()[:80]} ({Path(file).name}, line {line})"
                self.look(frame, line)
            if event == "line":
                reach(frame)
            return trace

        return trace

    def _is_spent(self) -> bool:
        """Count an event; whether it is the last one that is traced."""
        self._events += not self.is_alone
        is_spent = self.is_over or self._events > MAX_EVENTS
        if is_spent:
            set_trace(None)
            self.leave_threads()
        return is_spent

    def look(self, frame: FrameType | None = None, line: int = 0) -> None:
        """Compare with what was before, after a line of a function."""
        watch, before, start = self.watch, self.watch.before, time.perf_counter()
        if before is None or watch.reason or self._seconds > MAX_SECONDS:
            return
        try:
            objects, is_of_process = before.changed_objects(), before.is_process_changed()
            if frame is not None:  # also of an equal value, as it may be another value in other calls
                objects += before.stored_on(frame, line)
            if objects or is_of_process:
                watch.add(self._place, objects, not is_of_process)
        except Exception as error:  # it must not get into the user's code
            watch.give_up(error)
        self._seconds += time.perf_counter() - start
        if self._seconds > MAX_SECONDS and self.is_alone:
            watch.give_up(f"comparing what it refers to takes more than {MAX_SECONDS:g} s")


# -- copies of the environment


def copy_of(environment: object, own: Collection[str]) -> object:
    """Copy the environment for one episode: the attributes with these names are copied, the others are shared.

    Raises:
        Exception: the environment cannot be copied.
    """
    # without the class's own `__getstate__`, which may leave out what a copy can share, or `__new__`
    copied, attributes = object.__new__(type(environment)), vars(environment)
    memo = {id(value): value for name, value in attributes.items() if name not in own}
    memo[id(environment)] = copied
    for name, value in attributes.items():
        vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def attributes_to_copy(environment: Any, changed: list[object]) -> frozenset[str]:
    """The names of the attributes that lead to what calls changed, or back to the environment.

    Raises:
        Exception: a copy would not separate episodes, or cannot be made, for the reason of the message.
    """
    if hasattr(environment, "__del__"):
        raise ValueError("it has __del__")
    attributes = vars(environment)
    below = {name: Walk([value], [attributes], through_code=False) for name, value in attributes.items()}
    targets = [environment, *(item for item in changed if item is not attributes)]
    if not all(item is environment or any(item in walk for walk in below.values()) for item in targets):
        raise ValueError("it is not below the environment")
    own = frozenset(name for name, walk in below.items() if any(item in walk for item in targets))
    copied = Walk(vars(copy_of(environment, own)).values(), through_code=False)
    if any(item in copied for item in targets):
        raise ValueError("a copy of the environment still refers to it")
    return own
