"""Traces calls of an environment: for lines that no watched call has reached, and for what a call changes.

While a call runs alone, memory is compared before each instruction of the user's files that may write, so that a value
which is set and restored is found too.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from aitrain.environment.object_walk import class_attribute, is_not_watched
from aitrain.environment.state_snapshot import COPIED, StateChange, StateSnapshot, WrittenFiles
from aitrain.environment.state_watch import StateWatch

MAX_SECONDS = 5.0
"""Seconds of comparisons in one watched call."""
MAX_EVENTS = 20_000
"""Traced events of a call that runs beside others, about 6 ms; what it does later shows in the comparison only."""
_STORES = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR", "CALL"))
)
_STORE_GLOBAL = frozenset(dis.opmap.get(name) for name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_STORE_CELL = frozenset(dis.opmap.get(name) for name in ("STORE_DEREF", "DELETE_DEREF"))
_WRITES = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("STORE_", "DELETE_", "CALL", "BINARY_OP", "FOR_ITER", "SEND", "YIELD_VALUE"))
    and not name.endswith("_FAST")
)
"""Instructions that may change an object; a change is seen before the next of them, which might undo it."""


_CHANGING_METHODS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update", "__setattr__", "__setitem__", "__delitem__",
}  # fmt: skip
"""Methods of Python's containers that leave them as they are when the value is the same."""

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
        """Watch no more, although the call goes on."""
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
            operation = _bytes_of(code)[frame.f_lasti]
            if self._stored is not None:
                self._look_after_store()
            key = (code, frame.f_lasti, event)
            if (event == "return" or operation in _WRITES) and self._looks.get(key, 0) < 3:
                self._looks[key] = self._looks.get(key, 0) + 1
                self.look()
                if event == "opcode" and self._snapshot and not self.is_over:
                    self._note_store(frame, operation)
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

    def _note_store(self, frame: FrameType, operation: int) -> None:
        """Hold an assignment to an object that other calls see: the value may be the same as before."""
        assert self._snapshot is not None
        target: Any = None
        name = "a global variable"
        if operation in _STORE_GLOBAL:
            target = frame.f_globals
        elif operation in _STORE_CELL and (function := self._snapshot.walk.functions.get(frame.f_code)) is not None:
            name = _cell_names(frame.f_code)[frame.f_lasti]
            if name in frame.f_code.co_freevars and function.__closure__:
                target = function.__closure__[frame.f_code.co_freevars.index(name)]
        elif operation in _STORES and (node := _storing_nodes(frame.f_code).get(frame.f_lasti)) is not None:
            name = ast.unparse(node)
            target = _stored_to(node, frame)
            if not isinstance(node, ast.Call) and is_not_watched(_resolved(node, frame)):
                return  # `self.client = self.client or Client()`
        if target is not None and target in self._snapshot.walk:
            self._stored = (StateChange(name, self._place_of(frame)), target)


def _stored_to(node: ast.expr, frame: FrameType) -> Any:
    """The object that an assignment or a call changes; None if it cannot be found, or is none that a call changes."""
    if not isinstance(node, ast.Call):
        assert isinstance(node, (ast.Attribute, ast.Subscript))
        return _resolved(node.value, frame)
    if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr") and node.args:
        return _resolved(node.args[0], frame)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING_METHODS:
        owner = _resolved(node.func.value, frame)
        if owner is object and node.args:
            return _resolved(node.args[0], frame)
        return owner if isinstance(owner, COPIED) else None
    return None


@functools.lru_cache(maxsize=4096)
def _cell_names(code: CodeType) -> dict[int, str]:
    """Variables of enclosing functions that a function assigns, by the offset of the instruction."""
    return {step.offset: step.argval for step in dis.get_instructions(code) if step.opcode in _STORE_CELL}


def _resolved(node: ast.expr, frame: FrameType) -> Any:
    """The object of an expression, if that can be found without running code of the user; else None."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute) and (owner := _resolved(node.value, frame)) is not None:
        if node.attr == "__dict__":
            return getattr(owner, "__dict__", None)
        of_class = None if isinstance(owner, (type, ModuleType)) else class_attribute(owner, node.attr)
        if isinstance(of_class, types.MemberDescriptorType):
            return getattr(owner, node.attr, None)
        found = getattr(owner, "__dict__", {}).get(node.attr, of_class)
        return None if hasattr(type(found), "__get__") else found
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Constant)):
        owner = _resolved(node.value, frame)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else _resolved(node.slice, frame)
        if type(owner) in (list, tuple, dict) and type(key) in (str, int, bool):
            with suppress(LookupError, TypeError):
                return owner[key]
    return None


@functools.lru_cache(maxsize=4096)
def _storing_nodes(code: CodeType) -> dict[int, ast.expr]:
    """Targets of a function's assignments to attributes and items, and its calls, by the offset of the instruction."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    nodes = {
        (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset): node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        or (isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load))
    }
    return {2 * number: nodes[place] for number, place in enumerate(code.co_positions()) if place in nodes}


@functools.lru_cache(maxsize=4096)
def _bytes_of(code: CodeType) -> bytes:
    return code.co_code
