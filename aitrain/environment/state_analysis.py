"""Which attributes of an environment its calls write, read from its source.

An abstract interpreter follows the methods of one episode through their helpers, in the order of execution, and notes
each access to what calls share: attributes of the environment, of its class, and global variables. From these follows
whether calls may run at the same time on one object, see `StateReport`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

from aitrain.environment.abstract_values import (
    APPENDS,
    NONE,
    NOTHING,
    Use,
    Value,
    bound,
    exactly,
    expressions,
    imported,
    is_data,
    is_drawn_from,
    is_instance,
    is_library_object,
    is_lock,
    is_method,
    is_plain,
    is_super,
    joined,
    joined_names,
    looked_up,
    methods_in,
    names_self,
    owner_of,
    part_of,
    sample_of,
    static_attribute,
    unwrapped,
    use_of,
)
from aitrain.environment.loading import is_users_file
from aitrain.environment.source_code import FunctionNode, function_node
from aitrain.environment.watching import is_users_module, is_users_object

MAX_CALLS = 2000
"""Calls that are followed; an environment with more of them counts as one whose source says nothing."""

MAX_DEPTH = 40


@dataclass(frozen=True)
class Place:
    """One access in the user's code, as messages show it."""

    target: str
    """What is written, such as `self.case`."""
    function: str
    file: str
    line: int


@dataclass
class StateReport:
    """What the calls of an environment write, by name; each with the place of one write."""

    scratch: dict[str, Place] = field(default_factory=dict)
    """Written in each call before it is read there: exact with a copy of the object for each call."""
    carried: dict[str, Place] = field(default_factory=dict)
    """A later call may read what an earlier one wrote: exact only one call after another."""
    shared: set[str] = field(default_factory=set)
    """Written in a way that bears calls at the same time: logs, caches, what is made when it is first needed, and what
    the environment guards with a lock of its own."""
    guarded: set[str] = field(default_factory=set)
    """Of `shared`, what is set (and not only filled) under a lock."""
    unclear: Place | None = None
    """Something that the source does not show, so that there may be more writes."""


@dataclass(frozen=True)
class _Access:
    root: str
    kind: str
    """read (one item), look (at all of it), store, append, item (`x[key] = value`) or change (otherwise in place)."""
    place: Place
    is_first: bool
    """Whether the call may not have stored a value of its own there before."""
    is_locked: bool
    hangs_on: frozenset[str] | None = None
    """What the value, and whether it is stored at all, depend on beside the key of an item; None: on what was there."""


_READS = ("read", "look")


@dataclass
class _Frame:
    function: FunctionType
    owner: type | None
    names: dict[str, Value]
    of_class: bool = False
    declared_global: set[str] = field(default_factory=set)
    returned: list[tuple[Value, frozenset[str]]] = field(default_factory=list)


State = frozenset[str] | None
"""Roots that the call has stored a value of its own in, whatever way it took; `name!` where that value is a new object.
None: this point is never reached."""


def _meet(states: Iterable[State]) -> State:
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


# -- what is known about Python's own

_CHANGES = {
    "pop", "popitem", "clear", "remove", "discard", "sort", "reverse", "popleft", "rotate", "subtract", "setdefault",
    "difference_update", "intersection_update", "symmetric_difference_update", "move_to_end", "__setitem__",
    "__delitem__", "fill", "resize", "fill_", "copy_", "add_", "zero_", "put_nowait", "get_nowait", "seek", "truncate",
    "read", "readline", "send", "throw", "__next__",
}  # fmt: skip
_CHANGES_OF_OBJECTS = {
    "reset", "step", "seed", "push", "undo", "set_state", "load_state", "set_seed", "restore", "fetchone", "fetchall",
    "fetchmany",
}  # fmt: skip
_PARTS = {"get", "setdefault", "values", "items", "pop", "popitem", "popleft", "__getitem__", "keys"}
_CHANGE_FIRST = {
    "shuffle", "heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort", "insort_left", "insort_right",
    "next", "anext",
}  # fmt: skip
_PASS_ELEMENTS = {"list", "tuple", "sorted", "iter", "reversed", "enumerate", "zip", "filter", "map", "set", "dict"}
_HARMLESS = {
    "print", "str", "repr", "isinstance", "hasattr", "id", "dir", "hash", "callable", "bool", "len", "format", "iter",
}  # fmt: skip
_PER_CALL = (threading.local, ContextVar)
_CONTAINERS = (list, dict, set, bytearray)
_OF_ONE_CALL = {"model", "tokenizer", "completion", "messages", "text", "reply", "seed"}
"""Parameters that case_idx does not determine."""
_OF_BUILTINS = {name for kind in (str, bytes, int, float, list, dict, set, tuple) for name in dir(kind)}
_MESSAGES = {"debug", "info", "warning", "warn", "error", "log"}
_VIEWS = {
    "reshape", "view", "ravel", "squeeze", "unsqueeze", "transpose", "swapaxes", "permute", "T", "flat", "data",
    "expand", "select", "narrow", "detach", "numpy", "diagonal", "getbuffer",
}  # fmt: skip
_CHANGE_FIRST_OF_ARRAYS = {"copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis"}
_OF_THE_PROCESS = {
    ("os", "chdir"): "the working directory", ("posix", "chdir"): "the working directory",
    ("os", "putenv"): "os.environ", ("os", "umask"): "the umask",
    ("random", "seed"): "Python's random numbers", ("random", "setstate"): "Python's random numbers",
    ("numpy.random", "seed"): "numpy's random numbers", ("numpy.random", "set_state"): "numpy's random numbers",
    ("torch.random", "manual_seed"): "torch's random numbers", ("torch", "manual_seed"): "torch's random numbers",
    ("contextlib", "redirect_stdout"): "sys.stdout", ("contextlib", "redirect_stderr"): "sys.stderr",
    ("contextlib", "chdir"): "the working directory", ("locale", "setlocale"): "the locale",
}  # fmt: skip
"""What a call of these functions changes for all threads."""
_TELLING = {"str", "repr", "tuple", "dumps", "sha256", "sha1", "md5", "blake2b", "encode", "hexdigest", "digest"}
"""Calls whose result tells what they were given, as far as keys of a cache go."""


def analyze_state(environment: Any, level: str) -> StateReport:
    """What the calls of one episode write, for an environment that is played by its method `level`."""
    reader = _Reader(environment)
    try:
        reader.read_episode(level)
    except RecursionError:
        reader.give_up("the source is nested too deep")
    return reader.report()


def _process_wide(callee: Value) -> str | None:
    """What a function changes for the whole process."""
    known = callee.known
    if known is NOTHING or not callable(known):
        return None
    owner = getattr(known, "__self__", None)
    module = getattr(known, "__module__", None) or ""
    if owner is not None and not isinstance(owner, ModuleType):  # random.seed is a method of a hidden generator
        module = "random" if owner is getattr(random, "_inst", None) else type(owner).__module__
        module = "numpy.random" if module.startswith("numpy.random") and callee.roots == NONE else module
    name = getattr(known, "__name__", "")
    return _OF_THE_PROCESS.get((module, name)) if not callee.roots else None


def _is_display(node: ast.expr) -> bool:
    """Whether an expression is a container, so that `x += ...` changes x in place and x is no number."""
    return isinstance(node, (ast.List, ast.ListComp, ast.Tuple, ast.Set, ast.SetComp, ast.Dict, ast.DictComp))


def _is_query(arguments: list[Value]) -> bool:
    """Whether a statement of SQL only reads."""
    text = arguments[0].known if arguments else NOTHING
    return isinstance(text, str) and text.lstrip().lower().startswith(("select", "with", "explain"))


def _is_notice(node: ast.If) -> bool:
    """Whether a block only says something once: `if not self.told: print(...); self.told = True`."""
    flag = ast.unparse(node.test.operand) if isinstance(node.test, ast.UnaryOp) else ""
    sets = [each for each in node.body if isinstance(each, ast.Assign)]
    says = [each for each in node.body if isinstance(each, ast.Expr) and _says(each.value)]
    is_flag_only = [ast.unparse(target) for each in sets for target in each.targets] == [flag]
    is_constant = all(isinstance(each.value, ast.Constant) for each in sets)
    return is_flag_only and is_constant and not node.orelse and len(sets) + len(says) == len(node.body)


def _says(node: ast.expr) -> bool:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name == "print" or name.rpartition(".")[2] in _MESSAGES


def _of_a_notice(access: _Access) -> _Access:
    return replace(access, hangs_on=NONE) if access.kind == "store" else access


class _Reader:
    """Follows the calls of one episode."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.type = environment, type(environment)
        self.accesses: list[_Access] = []
        self.unclear: Place | None = None
        self.state: State = frozenset()
        self.at_yield: State = None
        self.locks = 0
        self.loops = 0
        self.conditions: list[frozenset[str]] = []
        self.stack: list[Any] = []
        self.calls = 0
        self.place = Place("", self.type.__name__, "", 0)
        self.stored_from: dict[str, frozenset[str]] = {}
        self.computed_from: dict[str, frozenset[str] | set[str]] = {}
        self.breaks: list[list[State]] = []
        self.referenced: set[str] | None = None
        self.is_test = False
        self.paths: dict[int, str] = {}
        self.made: dict[str, type | None] = {}
        self.stand_ins: dict[str, Any] = {}

    # -- episodes

    def read_episode(self, level: str) -> None:
        """The methods in the order in which an episode calls them; those that it may call in any order, as if each
        were the first."""
        if "__setattr__" in {name for owner in self.type.__mro__[:-1] for name in vars(owner)}:
            self.give_up("__setattr__")
        anytime = []
        if level == "start":
            self._enter("start")
            anytime = [name for name in ("step", "score", "close") if hasattr(self.type, name)]
        self.referenced = set()  # tools run later than get_tools, which only names them
        if hasattr(self.environment, "get_tools"):
            self._enter("get_tools")
        tools, self.referenced = self.referenced, None
        begun = self.state
        if level != "start":
            self._enter(level)
            begun = self.at_yield if level == "episode" and self.at_yield is not None else begun
        for name in [*anytime, *sorted(tools)]:
            self.state = begun
            self._enter(name)

    def _enter(self, name: str) -> None:
        callee = self._attribute_of_self(name, Value(is_self=True), is_called=True)
        self._call(callee, [], {}, binding="entry")

    def report(self) -> StateReport:
        """What follows from the accesses."""
        report = StateReport(unclear=self.unclear)
        for root in dict.fromkeys(access.root for access in self.accesses if access.kind not in _READS):
            self._classify(root, [access for access in self.accesses if access.root == root], report)
        return report

    def _classify(self, root: str, accesses: list[_Access], report: StateReport) -> None:
        writes = [access for access in accesses if access.kind not in _READS]
        reads = [access for access in accesses if access.kind in _READS]
        changes = [access for access in writes if access.kind != "store" and access.is_first]
        first_reads = [access for access in reads if access.is_first]
        place = (changes or writes)[0].place
        in_place = all(access.kind != "store" for access in writes)
        is_locked = all(access.is_locked for access in writes)
        is_read = bool(reads) or self.unclear is not None or self._is_read_unseen(root)
        if not changes and not first_reads and is_read:  # a class or a module is one, of which no call can have its own
            is_own = root.startswith("self.") and root.count(".") == 1  # what helpers hold is not copied
            (report.scratch if is_own else report.carried)[root] = place
        elif not is_read and not any(access.kind == "change" for access in changes):
            report.shared.add(root)  # a log
        elif is_locked and (in_place or all(read.is_locked for read in reads)):
            report.shared.add(root)
            report.guarded |= set() if in_place else {root}
        elif all(self._is_cache(access) for access in writes) and not (
            any(access.kind == "item" for access in writes) and any(read.kind == "look" for read in reads)
        ):
            report.shared.add(root)
        else:
            report.carried[root] = place

    def _is_read_unseen(self, root: str) -> bool:
        above = {access.root[:-1] for access in self.accesses if access.root.endswith(".*")}
        return any(root.startswith(each) for each in above)

    def _is_cache(self, access: _Access, above: frozenset[str] = NONE) -> bool:
        """Whether each call stores the same there: then it does not matter which is the first."""
        if access.hangs_on is None or not all(source.startswith("=") for source in access.hangs_on):
            return False
        above |= {access.root}
        used = {source[1:] for source in access.hangs_on}
        writes = [each for each in self.accesses if each.kind not in _READS and each.root in used - {access.root}]
        return all(each.root not in above and self._is_cache(each, above) for each in writes)

    # -- notes

    def give_up(self, what: str) -> None:
        """Note that the source does not show everything."""
        self.unclear = self.unclear or replace(self.place, target=what)

    def _note(self, root: str, kind: str, hangs_on: frozenset[str] | None = None) -> None:
        if self.state is None:
            return
        is_fresh = root in self.state if kind in (*_READS, "store") else root + "!" in self.state
        place = replace(self.place, target=root)
        self.accesses.append(_Access(root, kind, place, not is_fresh, self.locks > 0, hangs_on))

    def _store(self, root: str, value: Value, is_new: bool) -> None:
        if root == "self.?":  # a computed name
            self._note(root, "read")
        self._note(root, "store", self._when_first_needed(root, value))
        if self.state is not None:
            self.stored_from[root] = value.roots
            self.made[root] = value.made or self.made.get(root)
            self.state = (self.state - {root + "!"}) | {root} | ({root + "!"} if is_new else NONE)

    def _change(self, roots: Iterable[str], kind: str, hangs_on: frozenset[str] | None = None) -> None:
        for root in roots:
            others = self.stored_from.get(root, NONE) if self.state is not None and root in self.state else NONE
            if others:  # the call has put a part of something shared there
                self._note(root, "read")
                self._change(others - {root}, kind, hangs_on)
            else:
                self._note(root, kind, hangs_on)

    # -- statements

    def _block(self, statements: Sequence[ast.stmt], frame: _Frame) -> None:
        for statement in statements:
            if self.state is None:
                return
            self.place = replace(self.place, line=statement.lineno)
            self._statement(statement, frame)

    def _statement(self, node: ast.stmt, frame: _Frame) -> None:
        match node:
            case ast.Expr():
                self._eval(node.value, frame)
            case ast.Assign():
                value = self._eval(node.value, frame)
                for target in node.targets:
                    self._assign(target, value, frame, self._is_new(node.value, value))
            case ast.AnnAssign():
                if node.value is not None:
                    value = self._eval(node.value, frame)
                    self._assign(node.target, value, frame, self._is_new(node.value, value))
            case ast.AugAssign():
                self._augment(node, frame)
            case ast.Return():
                value = self._eval(node.value, frame) if node.value else Value()
                if self.state is not None:
                    frame.returned.append((value, self.state))
                self.state = None
            case ast.Raise():
                self._all(ast.iter_child_nodes(node), frame)
                self.state = None
            case ast.Break() | ast.Continue():
                if isinstance(node, ast.Break):
                    self.breaks[-1].append(self.state)
                self.state = None
            case _:
                self._compound(node, frame)

    def _compound(self, node: ast.stmt, frame: _Frame) -> None:
        match node:
            case ast.If():
                self._if(node, frame)
            case ast.For() | ast.AsyncFor():
                iterated = self._eval(node.iter, frame)
                self._loop(node, frame, lambda: self._assign(node.target, part_of(iterated), frame, False), False)
            case ast.While():
                endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
                self._loop(node, frame, lambda: self._eval(node.test, frame), endless)
            case ast.Try() | ast.TryStar():
                self._try(node, frame)
            case ast.With() | ast.AsyncWith():
                self._with(node, frame)
            case ast.Match():
                self._match(node, frame)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._nested(node, frame)
                frame.names[node.name] = Value()
            case ast.ClassDef():
                if names_self(node, frame.names):
                    self.give_up(f"the class {node.name}")
                frame.names[node.name] = Value()
            case ast.Delete():
                for target in node.targets:
                    self._delete(target, frame)
            case ast.Global():
                frame.declared_global.update(node.names)
            case ast.Nonlocal():  # of a function that is followed, and not nested in one that is
                frame.declared_global.update(set(node.names) - set(frame.names))
            case ast.Import() | ast.ImportFrom():
                self._import(node, frame)
            case _:
                self._all(ast.iter_child_nodes(node), frame)

    def _if(self, node: ast.If, frame: _Frame) -> None:
        self.is_test = True
        condition = self._eval(node.test, frame)
        self.is_test = False
        self.conditions.append(condition.sources)
        begin, ends, names, outcomes = self.state, [], frame.names, []
        is_notice = _is_notice(node)
        for block in (node.body, node.orelse):
            self.state, first, frame.names = begin, len(self.accesses), dict(names)
            self._block(block, frame)
            if is_notice:
                self.accesses[first:] = [_of_a_notice(access) for access in self.accesses[first:]]
            ends.append(self.state)
            outcomes += [frame.names] if self.state is not None else []
            if self.state is None:  # the call ends here, so that it matters which one came here
                self.accesses[first:] = [
                    replace(access, hangs_on=None) if access.kind == "store" else access
                    for access in self.accesses[first:]
                ]
        self.conditions.pop()
        frame.names = joined_names(outcomes or [names])
        self.state = _meet(ends)

    def _loop(
        self, node: ast.For | ast.AsyncFor | ast.While, frame: _Frame, head: Callable[[], Any], endless: bool
    ) -> None:
        self.breaks, self.loops = [*self.breaks, []], self.loops + 1
        begin, before = self.state, dict(frame.names)
        for _ in range(2 if self.loops == 1 else 1):  # the second time with what the first has computed
            self.state = begin
            condition = head()
            after_head = self.state
            self.conditions.append(condition.sources if isinstance(condition, Value) else NONE)
            self._block(node.body, frame)
            self.conditions.pop()
            frame.names = joined_names([before, frame.names])
        self.state = None if endless else after_head if isinstance(node, ast.While) else begin
        self._block(node.orelse, frame)
        self.loops -= 1
        *self.breaks, broken = self.breaks
        self.state = _meet([self.state, *broken])

    def _try(self, node: ast.Try | ast.TryStar, frame: _Frame) -> None:
        begin, ends, before, outcomes = self.state, [], dict(frame.names), []
        self._block(node.body, frame)
        self._block(node.orelse, frame)
        ends.append(self.state)
        outcomes += [frame.names] if self.state is not None else []
        interrupted = joined_names([before, frame.names])
        for handler in node.handlers:
            self.state, frame.names = begin, {**interrupted, **({handler.name: Value()} if handler.name else {})}
            self._block(handler.body, frame)
            ends.append(self.state)
            outcomes += [frame.names] if self.state is not None else []
        frame.names = joined_names(outcomes or [before])
        after, self.state = _meet(ends), begin
        self._block(node.finalbody, frame)
        gained = (self.state or NONE) - (begin or NONE)
        self.state = None if after is None or self.state is None else after | gained

    def _with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> None:
        locks = 0
        for item in node.items:
            value = self._eval(item.context_expr, frame)
            held = is_lock(item.context_expr, value)
            locks, self.locks = locks + held, self.locks + held
            value = self._entered(value)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, frame, True)
        self._block(node.body, frame)
        self.locks -= locks

    def _entered(self, manager: Value) -> Value:
        """What a context manager of the user's own returns; leaving it is followed right away."""
        if not (manager.is_self or is_users_object(manager.known)):
            return manager
        entered = manager
        for name in ("__enter__", "__aenter__", "__exit__", "__aexit__"):
            kind = self.type if manager.is_self else type(manager.known)
            _, method = looked_up(kind, name, None)
            if isinstance(method, FunctionType):
                if "exit" in name:
                    with self._perhaps():
                        self._inline(method, [manager], {}, owner=kind)
                else:
                    entered = self._inline(method, [manager], {}, owner=kind)
        return entered

    def _match(self, node: ast.Match, frame: _Frame) -> None:
        subject = self._eval(node.subject, frame)
        self.conditions.append(subject.sources)
        begin, ends, is_exhaustive, before, outcomes = self.state, [], False, dict(frame.names), []
        for case in node.cases:
            self.state, frame.names = begin, dict(before)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    frame.names[name] = part_of(subject)
            if case.guard is not None:
                self._eval(case.guard, frame)
            self._block(case.body, frame)
            ends.append(self.state)
            outcomes += [frame.names] if self.state is not None else []
            is_exhaustive |= case.guard is None and isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern
        self.conditions.pop()
        frame.names = joined_names(outcomes if is_exhaustive and outcomes else [*outcomes, before])
        self.state = _meet(ends if is_exhaustive else [*ends, begin])

    def _import(self, node: ast.Import | ast.ImportFrom, frame: _Frame) -> None:
        for alias in node.names:
            frame.names[alias.asname or alias.name.partition(".")[0]] = Value(known=imported(node, alias))

    @contextmanager
    def _perhaps(self) -> Iterator[None]:
        """Code that may not run, and whose stores therefore do not count."""
        begin = self.state
        yield
        self.state = begin

    # -- writes

    def _assign(self, target: ast.expr, value: Value, frame: _Frame, is_new: bool) -> None:
        match target:
            case ast.Name():
                self._assign_name(target.id, value, frame)
            case ast.Tuple() | ast.List():
                for each in target.elts:
                    self._assign(each, part_of(value), frame, is_new)
            case ast.Starred():
                self._assign(target.value, part_of(value), frame, is_new)
            case ast.Attribute():
                self._store_attribute(self._eval(target.value, frame, use="none"), target.attr, value, is_new)
            case ast.Subscript():
                key = self._eval(target.slice, frame)
                container = self._eval(target.value, frame, use="none")
                self._store_item(container, key, value, target.slice)

    def _assign_name(self, name: str, value: Value, frame: _Frame) -> None:
        if name in frame.declared_global:
            self._note(name, "store", self._when_first_needed(name, value))
            return
        symbol = f"{name}#{len(self.computed_from)}"
        self.computed_from[symbol] = value.sources
        frame.names[name] = replace(value, sources=frozenset({symbol}), exact=value.exact | {symbol})

    def _store_attribute(self, owner: Value, name: str, value: Value, is_new: bool) -> None:
        if owner.is_self:
            setter = getattr(inspect.getattr_static(self.type, name, None), "fset", None)
            if isinstance(setter, FunctionType):
                self._inline(setter, [Value(is_self=True), value], {}, owner=self.type)
            else:
                self._store(f"self.{name}", value, is_new)
        elif owner.is_class:
            root = f"{self.type.__name__}.{name}"
            self._note(root, "store", self._when_first_needed(root, value))
        elif self._is_shared_namespace(owner.known):
            root = f"{owner.known.__name__}.{name}"
            self._note(root, "store", self._when_first_needed(root, value))
        elif isinstance(owner.known, ModuleType):  # such as sys.stdout, which Python itself reads
            self._change_process(f"{owner.known.__name__}.{name}")
        elif is_users_object(owner.known):
            self._store_held(owner, name, value, is_new)
        elif not isinstance(owner.known, _PER_CALL):
            self._change(owner.roots, "change")

    def _store_held(self, owner: Value, name: str, value: Value, is_new: bool) -> None:
        setter = getattr(inspect.getattr_static(type(owner.known), name, None), "fset", None)
        if isinstance(setter, FunctionType):
            self._inline(setter, [owner, value], {})
        else:
            self._store(f"{self._path_of(owner)}.{name}", value, is_new)

    def _change_process(self, root: str) -> None:
        """Change something that the whole process has once."""
        self._note(root, "read")
        self._note(root, "change")

    def _store_item(self, container: Value, key: Value, value: Value, written: ast.expr) -> None:
        if container.is_namespace:
            name = written.value if isinstance(written, ast.Constant) and isinstance(written.value, str) else "?"
            self._store(f"self.{name}", value, False)
            return
        if container.known is os.environ and value.known is NOTHING:
            self._change_process("os.environ")
        self._change(container.roots, "item", self._hangs_on(container, key, value))

    def _when_first_needed(self, root: str, value: Value) -> frozenset[str] | None:
        """What an attribute depends on that is made where a test finds it missing; None for any other store."""
        is_tested = any(f"={root}" in condition for condition in self.conditions)
        if not is_tested or f"={root}" in value.sources or value.known is not NOTHING:
            return None
        return self._hangs_on(Value(roots=frozenset({root})), Value(), value)

    def _hangs_on(self, container: Value, key: Value, value: Value) -> frozenset[str] | None:
        """What an item depends on beside its key: parameters, and shared state (`=self.x`); None: on what was there."""
        own = {f"={root}" for root in container.roots}
        found = self._leaves(value.sources, key)
        if found & own or not (value.sources or key == Value()):
            return None  # `self.counts[key] = self.counts[key] + 1`, or `self.seen[key] = True`
        found |= self._leaves(frozenset().union(*self.conditions), key) - own
        if "case_idx" in key.exact:
            found = {source for source in found if source in _OF_ONE_CALL or source.startswith(("=", "*"))}
        return frozenset(found)

    def _leaves(self, sources: Iterable[str], key: Value) -> set[str]:
        """Parameters and shared state that values are computed from, less what a key tells."""
        found: set[str] = set()
        left = [source for source in sources if source not in key.exact]
        while left:
            source = left.pop()
            before = self.computed_from.get(source)
            if before is None:
                found.add(source)
            else:
                left += [each for each in before if each not in key.exact]
        return found

    def _augment(self, node: ast.AugAssign, frame: _Frame) -> None:
        value = self._eval(node.value, frame)
        before = self._eval(node.target, frame)
        if isinstance(node.target, ast.Name) and node.target.id not in frame.declared_global:
            if is_data(before.known):
                self._change(before.roots, "change")
            elif isinstance(before.known, _CONTAINERS) or (before.known is NOTHING and _is_display(node.value)):
                self._change(before.roots, "append")
            frame.names[node.target.id] = replace(before, sources=before.sources | value.sources)
        elif isinstance(node.target, ast.Name):
            self._note(node.target.id, "read")
            self._note(node.target.id, "store")
        elif isinstance(node.target, ast.Attribute):
            self._store_attribute(self._eval(node.target.value, frame), node.target.attr, value, False)
        else:
            self._change(before.roots or self._eval(node.target.value, frame).roots, "change")

    def _delete(self, target: ast.expr, frame: _Frame) -> None:
        if isinstance(target, ast.Attribute):
            owner = self._eval(target.value, frame)
            if owner.is_self:
                root = f"self.{target.attr}"
                self._note(root, "read")
                self._note(root, "store")
                self.state = self.state - {root, root + "!"} if self.state is not None else None
            else:
                self._change(owner.roots, "change")
        elif isinstance(target, ast.Subscript):
            self._change(self._eval(target.value, frame).roots, "change")
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._delete(each, frame)

    def _is_new(self, node: ast.expr, value: Value) -> bool:
        """Whether a value is an object of the call's own."""
        return not value.roots and not value.is_self

    # -- expressions

    def _all(self, nodes: Iterable[ast.AST], frame: _Frame) -> Value:
        return joined([self._eval(node, frame) for node in nodes if isinstance(node, ast.expr)])

    def _eval(self, node: ast.expr, frame: _Frame, use: Use = "all") -> Value:
        """The value of an expression, with a note of what it does."""
        match node:
            case ast.Name():
                return self._name(node.id, frame, use)
            case ast.Attribute():
                return self._attribute(node, frame, is_called=False, use=use)
            case ast.Subscript():
                return self._subscript(node, frame, use)
            case ast.Call():
                return self._call_node(node, frame)
            case ast.Lambda():
                self._nested(node, frame)
                return Value()
            case ast.Await() | ast.YieldFrom() | ast.Starred() | ast.FormattedValue():
                return self._eval(node.value, frame)
            case ast.NamedExpr():
                value = self._eval(node.value, frame)
                self._assign(node.target, value, frame, False)
                return value
            case ast.IfExp():
                test = self._eval(node.test, frame)
                with self._perhaps():
                    chosen = joined([self._eval(node.body, frame), self._eval(node.orelse, frame)])
                return replace(chosen, sources=chosen.sources | test.sources)
            case ast.BoolOp():
                first = self._eval(node.values[0], frame)
                with self._perhaps():
                    return joined([first, *(self._eval(value, frame) for value in node.values[1:])])
            case _:
                return self._new_value(node, frame)

    def _new_value(self, node: ast.expr, frame: _Frame) -> Value:
        """An object that an expression makes."""
        match node:
            case ast.Yield():
                value = self._eval(node.value, frame) if node.value else Value()
                self.at_yield = _meet([self.at_yield, self.state])
                self._escape([value], "a yield")
                return Value(frozenset({"reply"}))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, frame)
            case ast.List() | ast.Tuple() | ast.Set():
                items = [self._eval(item, frame) for item in node.elts]
                self._escape(items, "a list")
                whole = joined(items)
                return Value(whole.sources, exact=exactly(items), elements=whole.parts)
            case ast.Dict():
                items = [self._eval(item, frame) for item in (*node.keys, *node.values) if item is not None]
                self._escape(items, "a dict")
                whole = joined(items)
                return Value(whole.sources, elements=whole.parts)
            case ast.Compare():
                is_membership = self.is_test and all(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops)
                how: Use = "item" if is_membership else "all"  # in a test it guards what follows; else it is a result
                compared = [self._eval(node.left, frame), *(self._eval(each, frame, how) for each in node.comparators)]
                return Value(joined(compared).sources)
            case ast.Constant():
                return Value(known=node.value)
            case ast.JoinedStr():
                texts = [self._eval(value, frame) for value in expressions(node)]
                return Value(joined(texts).sources, exact=exactly(texts))
            case _:  # operators and the like make new values of old ones
                return Value(self._all(expressions(node), frame).sources)

    def _name(self, name: str, frame: _Frame, use: Use) -> Value:
        if name in frame.names:
            return frame.names[name]
        cells = dict(zip(frame.function.__code__.co_freevars, frame.function.__closure__ or (), strict=False))
        if name in cells:
            try:
                return self._enclosed(name, cells[name].cell_contents, use)
            except ValueError:
                return Value()
        if name in frame.function.__globals__:
            value = frame.function.__globals__[name]
            if value is self.environment:
                return Value(is_self=True)
            if is_plain(value) or inspect.isclass(value) or inspect.isroutine(value):
                if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType):
                    return self._of_object(value)
                return self._plain_variable(name, value)
            if not isinstance(value, _PER_CALL) and use != "none":
                self._note(name, "look" if use == "all" else "read")
            return Value(frozenset({f"={name}"}), roots=frozenset({name}), known=value)
        return Value(known=getattr(builtins, name, NOTHING))

    def _plain_variable(self, name: str, value: Any) -> Value:
        """A global, or a variable of an enclosing function, whose value cannot be changed in place."""
        self._note(name, "read")
        return Value(frozenset({f"={name}"}), known=NOTHING if value is None else value)

    def _enclosed(self, name: str, value: Any, use: Use) -> Value:
        """A variable of an enclosing function that has returned."""
        if value is self.environment or inspect.isclass(value) or inspect.isroutine(value):
            return self._of_object(value)
        if is_plain(value):
            return self._plain_variable(name, value)
        if not isinstance(value, _PER_CALL) and use != "none":
            self._note(name, "look" if use == "all" else "read")
        return Value(frozenset({f"={name}"}), roots=frozenset({name}), known=value)

    def _of_object(self, value: Any) -> Value:
        if value is self.environment:
            return Value(is_self=True)
        return Value(known=value, is_class=inspect.isclass(value) and value in self.type.__mro__[:-1])

    def _attribute(self, node: ast.Attribute, frame: _Frame, is_called: bool, use: Use = "all") -> Value:
        if isinstance(node.value, ast.Call) and is_super(node.value):
            first = next(iter(frame.names.values()), Value())
            base = Value(is_self=first.is_self, is_class=first.is_class, after=frame.owner)
        else:
            base = self._eval(node.value, frame, use)
        if base.is_self and node.attr == "__dict__":
            return Value(is_namespace=True)
        if base.is_self and node.attr == "__class__":
            return Value(is_class=True, known=self.type)
        if base.is_self:
            return self._attribute_of_self(node.attr, base, is_called, use)
        if base.is_class:
            return self._attribute_of_class(node.attr, base)
        if self._is_shared_namespace(base.known):
            return self._attribute_of_namespace(base, node.attr, use)
        found = static_attribute(base.known, node.attr)
        if found is self.environment:  # a helper that holds the environment
            return Value(is_self=True)
        if is_users_object(base.known):
            return self._attribute_of_held(node.attr, base, is_called, use)
        return replace(base, known=found, receiver=base)

    def _attribute_of_held(self, name: str, base: Value, is_called: bool, use: Use) -> Value:
        """An attribute of an object of the user's own that calls share: state with a path of its own."""
        _, found = looked_up(type(base.known), name, None)
        own = vars(base.known)
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, [base], {})
        if isinstance(found, functools.cached_property):
            return Value(base.sources, known=own.get(name, NOTHING))
        if name not in own and is_method(found):
            return replace(base, known=found, receiver=base)
        return self._state_at(f"{self._path_of(base)}.{name}", own.get(name, found), is_called, use)

    def _path_of(self, held: Value) -> str:
        """One name for an object, by whatever way it is reached."""
        return self.paths.setdefault(id(held.known), "|".join(sorted(held.roots)) or type(held.known).__name__)

    def _is_shared_namespace(self, known: Any) -> bool:
        """Whether this is a class, module or function of the user's, whose attributes all calls share."""
        if isinstance(known, ModuleType):
            return is_users_module(known.__name__)
        return isinstance(known, (type, FunctionType)) and is_users_module(known.__module__)

    def _attribute_of_namespace(self, base: Value, name: str, use: Use) -> Value:
        found = static_attribute(base.known, name)
        if isinstance(found, (type, ModuleType)) or is_method(found) or inspect.isroutine(found):
            return replace(base, known=found, receiver=base)
        return self._state_at(f"{base.known.__name__}.{name}", found, False, use)

    def _attribute_of_self(self, name: str, base: Value, is_called: bool, use: Use = "all") -> Value:
        owner, found = looked_up(self.type, name, base.after)
        own = getattr(self.environment, "__dict__", {})
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, [Value(is_self=True)], {}, owner=owner)
        if isinstance(found, functools.cached_property):
            value = self._inline(found.func, [Value(is_self=True)], {}, owner=owner)  # type: ignore[arg-type]
            root = f"self.{name}"
            self._note(root, "look" if use == "all" else "read")
            known = own.get(name, self._stand_in(root, value.made))
            return Value(value.sources, roots=NONE if is_plain(known) else frozenset({root}), known=known)
        if name in own and isinstance(own[name], MethodType) and own[name].__self__ is self.environment:
            found = own[name].__func__
        elif name in own or not is_method(found):
            return self._state_of_self(name, own.get(name, found), is_called, use)
        if not is_called:
            self._refer(name, Value(known=found, receiver=base, after=owner))
        return Value(known=found, receiver=replace(base, is_self=True), after=owner)

    def _state_of_self(self, name: str, value: Any, is_called: bool, use: Use) -> Value:
        for held in methods_in(value, self.environment):
            self._refer(held.__name__, Value(known=held.__func__, receiver=Value(is_self=True)))
        if name in vars(self.type) or name not in getattr(self.environment, "__dict__", {}):
            self._note(f"{self.type.__name__}.{name}", "look" if use == "all" else "read")
        return self._state_at(f"self.{name}", value, is_called, use)

    def _state_at(self, root: str, value: Any, is_called: bool, use: Use) -> Value:
        if use != "none" and not (is_called and is_plain(value)):
            self._note(root, "look" if use == "all" else "read")
        if value is None:  # something is to be there later
            value = self._stand_in(root, self.made.get(root))
        if is_plain(value) and self.state is not None and root not in self.state:
            return Value(frozenset({f"={root}"}), known=value)
        is_own = self.state is not None and root in self.state
        roots = frozenset({root, *self._aliases(value)})
        return Value(frozenset({f"={root}"}), roots=roots, known=NOTHING if is_own else value)

    def _aliases(self, value: Any) -> list[str]:
        """Attributes that hold the same container."""
        own = getattr(self.environment, "__dict__", {})
        return [f"self.{name}" for name, held in own.items() if held is value] if isinstance(value, _CONTAINERS) else []

    def _attribute_of_class(self, name: str, base: Value) -> Value:
        owner, found = looked_up(self.type, name, base.after)
        if is_method(found):
            return Value(known=found, receiver=base, after=owner)
        root = f"{self.type.__name__}.{name}"
        self._note(root, "read")
        return Value(frozenset({f"={root}"}), roots=NONE if is_plain(found) else frozenset({root}), known=found)

    def _refer(self, name: str, method: Value) -> None:
        """A method that is handed on may be called, now or later, or never."""
        if self.referenced is not None:
            self.referenced.add(name)
        else:
            with self._perhaps():
                self._call(method, [], {}, binding="entry")

    def _subscript(self, node: ast.Subscript, frame: _Frame, use: Use) -> Value:
        container, key = (
            self._eval(node.value, frame, "none" if use == "none" else "item"),
            self._eval(node.slice, frame),
        )
        if container.is_namespace:
            name = node.slice.value if isinstance(node.slice, ast.Constant) else "?"
            return self._state_of_self(str(name), getattr(self.environment, str(name), NOTHING), False, use)
        return Value(container.sources | key.sources, roots=container.parts, known=sample_of(container.known))

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> Value:
        sources: list[Value] = []
        with self._perhaps():
            for each in node.generators:
                iterated = self._eval(each.iter, frame)
                sources.append(iterated)
                self._assign(each.target, part_of(iterated), frame, False)
                sources += [self._eval(test, frame) for test in each.ifs]
            made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            values = [self._eval(value, frame) for value in made]
        whole = joined(values)
        return Value(whole.sources | joined(sources).sources, elements=whole.parts)

    def _nested(self, node: FunctionNode, frame: _Frame) -> None:
        """A function inside of a function: it may be called from here on, as often as it likes."""
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        names = {**frame.names, **{each.arg: Value() for each in every if each is not None}}
        inner = _Frame(frame.function, frame.owner, names, declared_global=set(frame.declared_global))
        place, breaks, at_yield = self.place, self.breaks, self.at_yield
        self._all([*arguments.defaults, *(default for default in arguments.kw_defaults if default)], frame)
        with self._perhaps():
            if isinstance(node, ast.Lambda):
                self._eval(node.body, inner)
            else:
                self._block(node.body, inner)
        self.place, self.breaks, self.at_yield = place, breaks, at_yield

    # -- calls

    def _call_node(self, node: ast.Call, frame: _Frame) -> Value:
        if isinstance(node.func, ast.Attribute):
            callee = self._attribute(node.func, frame, is_called=True, use=use_of(node.func.attr))
            method = node.func.attr
        else:
            callee, method = self._eval(node.func, frame), ""
        arguments = [self._eval(argument, frame) for argument in node.args]
        keywords = {each.arg or "**": self._eval(each.value, frame) for each in node.keywords}
        if "out" in keywords:
            self._change(keywords["out"].roots, "change")
        special = self._special_call(node, callee, method, arguments)
        if special is not None:
            return special
        if (method or getattr(callee.known, "__name__", "")) in _TELLING:
            told = [*arguments, callee.receiver or Value()]
            return Value(joined(told).sources, exact=exactly(told))
        has_star = any(isinstance(argument, ast.Starred) for argument in node.args)
        return self._call(callee, arguments, keywords, binding="star" if has_star else "given")

    def _special_call(self, node: ast.Call, callee: Value, method: str, arguments: list[Value]) -> Value | None:
        """Python's own ways to read and write attributes, and methods that change what they are called on."""
        first = arguments[0] if arguments else Value()
        name = getattr(callee.known, "__name__", "") if callee.receiver is None or callee.roots == NONE else ""
        if callee.receiver is not None and callee.receiver.is_namespace:
            if method in APPENDS | _CHANGES:
                self._store("self.?", Value(), False)
            return Value()
        if method in ("__setattr__", "__delattr__"):
            owner, rest = (first, node.args[1:]) if first.is_self else (callee.receiver or Value(), node.args)
            return self._set_by_name(owner, rest)
        if callee.known in (setattr, delattr):
            return self._set_by_name(first, node.args[1:])
        if callee.known is getattr and first.is_self:
            return self._get_by_name(node.args[1:])
        if callee.known is hasattr and first.is_self and isinstance(node.args[-1], ast.Constant):
            return self._tests_for(str(node.args[-1].value))
        if callee.known is vars and first.is_self:
            return Value(is_namespace=True)
        if callee.known is type and first.is_self:
            return Value(is_class=True, known=self.type)
        process_wide = _process_wide(callee)
        if process_wide is not None:
            self._change_process(process_wide)
            return Value()
        if name in _CHANGE_FIRST_OF_ARRAYS and callee.receiver is not None and not callee.roots:
            self._change(first.roots, "change")
        if name in _CHANGE_FIRST and first.roots:
            self._change(first.roots, "change")
            return part_of(first)
        if callee.known in (list, tuple, sorted, iter, reversed, enumerate, zip, filter, map, set, dict):
            whole = joined(arguments)
            return Value(whole.sources, elements=whole.parts)
        if method in ("acquire", "release") and callee.receiver is not None:
            locks = is_lock(node.func.value, callee.receiver) if isinstance(node.func, ast.Attribute) else 0
            self.locks = max(0, self.locks + (locks if method == "acquire" else -locks))
        if callee.receiver is not None and callee.receiver.roots:
            return self._method_of_state(callee, method, arguments)
        return None

    def _tests_for(self, name: str) -> Value:
        """`hasattr(self, name)`."""
        self._note(f"self.{name}", "read")
        return Value(frozenset({f"=self.{name}"}))

    def _set_by_name(self, owner: Value, arguments: list[ast.expr]) -> Value:
        named = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else "?"
        if owner.is_self or owner.is_class:
            self._store_attribute(owner, str(named), Value(), False)
        else:
            self._change(owner.roots, "change")
        return Value()

    def _get_by_name(self, arguments: list[ast.expr]) -> Value:
        if arguments and isinstance(arguments[0], ast.Constant):
            return self._attribute_of_self(str(arguments[0].value), Value(is_self=True), is_called=False)
        for name in dir(self.type):  # a method chosen by a name that was computed: any of them
            if not name.startswith("__") and name not in ("build_dataset", "build_eval_dataset", "reference"):
                _, found = looked_up(self.type, name, None)
                if is_method(found):
                    self._refer(name, Value(known=found, receiver=Value(is_self=True)))
        return Value()

    def _method_of_state(self, callee: Value, method: str, arguments: list[Value]) -> Value | None:
        """A method of something that calls share."""
        receiver = callee.receiver or Value()
        whole = joined([receiver, *arguments])
        held = receiver.known
        if isinstance(held, _PER_CALL) or is_lock(None, receiver):
            return Value()
        follows = isinstance(callee.known, FunctionType) and is_users_file(callee.known.__code__.co_filename)
        if follows:
            return None
        if is_drawn_from(held) or (method in _CHANGES_OF_OBJECTS and not isinstance(held, _CONTAINERS)):
            self._change(receiver.roots, "change")
        elif is_data(held):
            return self._method_of_data(receiver, method, whole)
        elif method in ("execute", "executemany", "executescript") and not _is_query(arguments):
            self._change(receiver.roots, "change")
        elif held is not NOTHING and not isinstance(held, _CONTAINERS) and is_library_object(held):
            return Value(whole.sources)
        elif method == "setdefault" and len(arguments) == 2:
            self._change(receiver.roots, "item", self._hangs_on(receiver, *arguments))
        elif method in APPENDS:
            self._change(receiver.roots, "append")
        elif method in _CHANGES:
            self._change(receiver.roots, "change")
        elif held is NOTHING and method not in _OF_BUILTINS:  # it may read whatever the object holds
            for root in receiver.roots:
                self._note(f"{root}.*", "read")
        return Value(
            whole.sources,
            exact=receiver.exact if method in _TELLING else NONE,
            roots=receiver.parts if method in _PARTS else NONE,
            elements=receiver.parts,
        )

    def _method_of_data(self, receiver: Value, method: str, whole: Value) -> Value:
        """A method of an array, a tensor or a buffer."""
        in_place = method.endswith("_") and not method.startswith("_")
        if in_place or method in _CHANGES | APPENDS:
            self._change(receiver.roots, "change")
        is_view = in_place or method in _VIEWS
        return replace(receiver, receiver=None) if is_view else Value(whole.sources)

    def _call(
        self,
        callee: Value,
        arguments: list[Value],
        keywords: dict[str, Value],
        binding: str = "given",
    ) -> Value:
        receiver = callee.receiver
        whole = joined([*arguments, *keywords.values(), Value(receiver.sources) if receiver else Value()])
        plain, is_static, of_class = unwrapped(callee.known)
        if plain is None:
            call = None if inspect.isclass(callee.known) else static_attribute(callee.known, "__call__")
            if isinstance(call, FunctionType) and is_users_file(call.__code__.co_filename):
                return self._inline(call, [callee, *arguments], keywords)  # an object of the user's that is called
            self._call_unseen(callee, [*arguments, *keywords.values()])
            return Value(whole.sources, made=callee.known if inspect.isclass(callee.known) else None)
        is_own = receiver is not None and (receiver.is_self or receiver.is_class)
        if not is_own and not is_users_file(plain.__code__.co_filename):
            self._escape([*arguments, *keywords.values()], plain.__name__)
            return Value(whole.sources)
        if isinstance(callee.known, MethodType):
            bound = self._of_object(callee.known.__self__)
            arguments = [replace(bound, roots=receiver.roots if receiver else NONE), *arguments]
        elif receiver is not None and not is_static and (receiver.is_self or of_class):
            arguments = [self._bound_to(receiver, of_class), *arguments]
        elif receiver is not None and not is_static and not receiver.is_class and is_instance(receiver.known):
            arguments = [receiver, *arguments]
        owner = callee.after or (owner_of(self.type, plain) if is_own else None)
        value = self._inline(plain, arguments, keywords, owner, binding)
        if isinstance(callee.known, functools._lru_cache_wrapper):  # all calls get the same object
            root = f"{plain.__name__}()"
            self._note(root, "read")
            return replace(value, roots=frozenset({root}), known=self._stand_in(root, value.made))
        return value

    def _stand_in(self, root: str, kind: type | None) -> Any:
        """An empty object of a class, for a shared one that a call makes later: its methods are looked up there."""
        if kind is None or not is_users_module(kind.__module__) or hasattr(kind, "__del__"):
            return NOTHING
        if root not in self.stand_ins:
            try:
                self.stand_ins[root] = object.__new__(kind)
            except TypeError:
                return NOTHING
        known = self.stand_ins[root]
        return known if is_users_object(known) else NOTHING

    def _bound_to(self, receiver: Value, of_class: bool) -> Value:
        """What a method gets as its first argument."""
        if not of_class:
            return Value(is_self=True)
        kind = receiver.known if inspect.isclass(receiver.known) else type(receiver.known)
        if receiver.is_self or receiver.is_class or kind is object:
            return Value(is_class=True, known=self.type)
        return self._of_object(kind)

    def _call_unseen(self, callee: Value, arguments: list[Value]) -> None:
        is_own = callee.receiver is not None and callee.receiver.is_self
        if is_own and callee.known is not NOTHING and not inspect.isclass(callee.known):
            self.give_up(f"self.{getattr(callee.known, '__name__', '?')}")
        name = getattr(callee.known, "__name__", "what it is handed to")
        if callee.known in (exec, eval):
            self.give_up(name)
        if name not in _HARMLESS:
            self._escape(arguments, name)

    def _escape(self, values: Iterable[Value], where: str) -> None:
        """The environment is handed to code that is not read."""
        if any(value.is_self or value.is_namespace for value in values):
            self.give_up(f"self, which {where} holds")

    def _shared_defaults(self, function: FunctionType, names: dict[str, Value]) -> dict[str, Value]:
        """Containers that are defaults of parameters, and so the same ones in each call."""
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
        shared = {}
        for name, value in defaults.items():
            if isinstance(value, _CONTAINERS) and names.get(name) == Value():
                root = f"{function.__name__}.{name}"
                self._note(root, "read")
                shared[name] = Value(frozenset({f"={root}"}), roots=frozenset({root}), known=value)
        return shared

    def _inline(
        self,
        function: FunctionType,
        arguments: list[Value],
        keywords: dict[str, Value],
        owner: type | None = None,
        binding: str = "given",
    ) -> Value:
        """Follow a call into a function."""
        whole = joined([*arguments, *keywords.values()])
        code, node = function.__code__, function_node(function)
        self.calls += 1
        if code in self.stack:
            return Value(whole.sources, roots=whole.parts)
        if node is None or self.calls > MAX_CALLS or len(self.stack) > MAX_DEPTH:
            self.give_up(f"the source of {code.co_name}")
            return Value(whole.sources)
        names = bound(node, arguments, keywords, binding)
        names |= self._shared_defaults(function, names)
        frame = _Frame(function, owner, names)
        before = self.place, self.locks, self.breaks
        self.place = Place("", code.co_qualname, code.co_filename, code.co_firstlineno)
        self.breaks = []
        self.stack.append(code)
        read_before = len(self.accesses)
        if isinstance(node, ast.Lambda):
            value = self._eval(node.body, frame)
        else:
            self._block(node.body, frame)
            if self.state is not None:
                frame.returned.append((Value(), self.state))
            self.state = _meet([state for _, state in frame.returned])
            values = [value for value, _ in frame.returned]
            value = values[0] if len(values) == 1 else joined(values)
        self.stack.pop()
        self.place, self.locks, self.breaks = before
        read = {f"={access.root}" for access in self.accesses[read_before:]}
        known = value.known if value.roots and is_users_object(value.known) else NOTHING
        return Value(
            value.sources | read, value.exact, value.roots, value.elements, value.is_self, known=known, made=value.made
        )
