"""Static analysis of the state that an environment's calls write.

An abstract interpreter follows the methods of one episode and their helpers in the order of execution, and records each
access to shared state: attributes of the environment, of helper objects and of classes, and global variables. Whether
calls may run concurrently on one object follows from these accesses, see `StateReport`.

This module interprets episodes and statements. Its base classes interpret expressions and assignments
(`expression_reader`), calls (`call_reader`), and attributes and items (`attribute_reader`); `access_log` records
accesses.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType

from aitrain.environment.abstract_values import (
    EMPTY,
    Arguments,
    Value,
    find_in_mro,
    imported_object,
    is_lock,
    item_of,
    merge_scopes,
    names_self,
)
from aitrain.environment.access_log import CallFrame, StoredRoots, merge_states
from aitrain.environment.effects import is_one_time_message
from aitrain.environment.expression_reader import ExpressionReader
from aitrain.environment.state_report import StateReport, classify_accesses
from aitrain.environment.state_watch import is_users_object

Ending = tuple[StoredRoots, dict[str, Value]]
"""State and local variables at the end of one of several paths."""


def analyze_state(environment: object, level: str) -> StateReport:
    """Analyze the calls of one episode; `level` is the environment's method that plays it."""
    reader = _EpisodeReader(environment)
    try:
        reader.read_episode(level)
    except RecursionError:
        reader.give_up("the source is nested too deep")
    return classify_accesses(reader.accesses, reader.unclear)


class _EpisodeReader(ExpressionReader):
    """Interprets the calls of one episode."""

    def read_episode(self, level: str) -> None:
        """Interpret the methods in the order of an episode; methods without a fixed order each start from the same
        state."""
        if "__setattr__" in {name for owner in self.type.__mro__[:-1] for name in vars(owner)}:
            self.give_up("__setattr__")
        anytime = []
        if level == "start":
            self._enter("start")
            if hasattr(self.type, "step"):  # `start` may return the environment
                anytime = [name for name in ("opening", "step", "score", "close") if hasattr(self.type, name)]
        self.referenced = set()  # get_tools only refers to tools, which run later
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
        self._call(self._attribute_of_self(name, is_called=True), Arguments(is_entry=True))

    def _block(self, statements: Sequence[ast.stmt], frame: CallFrame) -> None:
        for statement in statements:
            if self.state is None:
                return
            self.place = replace(self.place, line=statement.lineno)
            self._statement(statement, frame)

    def _statement(self, node: ast.stmt, frame: CallFrame) -> None:
        match node:
            case ast.Assign() | ast.AnnAssign():
                if node.value is not None:
                    value = self._eval(node.value, frame)
                    is_new = not value.roots and not value.is_self  # an object that the call created
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._assign(target, value, frame, is_new)
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
            case ast.Delete():
                for target in node.targets:
                    self._delete(target, frame)
            case ast.Global() | ast.Nonlocal():  # nonlocal variables belong to an interpreted function
                frame.declared_global.update(set(node.names) - set(frame.names))
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    frame.names[name] = Value(known=imported_object(node, alias))
            case _:
                self._compound(node, frame)

    def _compound(self, node: ast.stmt, frame: CallFrame) -> None:
        match node:
            case ast.If():
                self._if(node, frame)
            case ast.For() | ast.AsyncFor():
                iterated = self._eval(node.iter, frame)
                self._loop(node, frame, lambda: self._assign(node.target, item_of(iterated), frame, False))
            case ast.While():
                self._loop(node, frame, lambda: self._eval(node.test, frame))
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
            case _:
                self._all(ast.iter_child_nodes(node), frame)

    def _join(self, ends: list[Ending], before: dict[str, Value], frame: CallFrame) -> None:
        """Go on after several paths; with the local variables of before, if none of them gets here."""
        frame.names = merge_scopes([names for state, names in ends if state is not None] or [before])
        self.state = merge_states(state for state, _ in ends)

    def _if(self, node: ast.If, frame: CallFrame) -> None:
        self.is_test = True
        condition = self._eval(node.test, frame)
        self.is_test = False
        self.conditions.append(condition.sources)
        begin, before, ends = self.state, frame.names, list[Ending]()
        says_once = is_one_time_message(node)
        for block in (node.body, node.orelse):
            self.state, frame.names, first = begin, dict(before), len(self.accesses)
            self._block(block, frame)
            ends.append((self.state, frame.names))
            for number, access in enumerate(self.accesses[first:], first):
                if access.kind == "store" and (says_once or self.state is None):
                    # a flag is equal in each call; where the call ends in this branch, its condition matters
                    depends_on = None if self.state is None else EMPTY
                    self.accesses[number] = replace(access, depends_on=depends_on)
        self.conditions.pop()
        self._join(ends, before, frame)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: CallFrame, head: Callable[[], object]) -> None:
        self.breaks, self.loops = [*self.breaks, []], self.loops + 1
        begin, before = self.state, dict(frame.names)
        for _ in range(2 if self.loops == 1 else 1):  # the second pass sees the results of the first
            self.state = begin
            condition = head()
            after_head = self.state
            self.conditions.append(condition.sources if isinstance(condition, Value) else EMPTY)
            self._block(node.body, frame)
            self.conditions.pop()
            frame.names = merge_scopes([before, frame.names])
        if isinstance(node, ast.While):
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            self.state = None if is_endless else after_head
        else:
            self.state = begin
        self._block(node.orelse, frame)
        self.loops -= 1
        *self.breaks, broken = self.breaks
        self.state = merge_states([self.state, *broken])

    def _try(self, node: ast.Try | ast.TryStar, frame: CallFrame) -> None:
        begin, before = self.state, dict(frame.names)
        self._block(node.body, frame)
        self._block(node.orelse, frame)
        ends = [(self.state, frame.names)]
        interrupted = merge_scopes([before, frame.names])
        for handler in node.handlers:
            self.state, frame.names = begin, {**interrupted, **({handler.name: Value()} if handler.name else {})}
            self._block(handler.body, frame)
            ends.append((self.state, frame.names))
        self._join(ends, before, frame)
        after, self.state = self.state, begin
        self._block(node.finalbody, frame)
        gained = (self.state or EMPTY) - (begin or EMPTY)
        self.state = None if after is None or self.state is None else after | gained

    def _with(self, node: ast.With | ast.AsyncWith, frame: CallFrame) -> None:
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
        """Result of a user-defined context manager; its exit is interpreted immediately."""
        if not (manager.is_self or is_users_object(manager.known)):
            return manager
        entered, kind = manager, self.type if manager.is_self else type(manager.known)
        for name in ("__enter__", "__aenter__", "__exit__", "__aexit__"):
            _, method = find_in_mro(kind, name, None)
            if isinstance(method, FunctionType) and "exit" in name:
                with self._conditional():
                    self._inline(method, Arguments((manager,)), kind)
            elif isinstance(method, FunctionType):
                entered = self._inline(method, Arguments((manager,)), kind)
        return entered

    def _match(self, node: ast.Match, frame: CallFrame) -> None:
        subject = self._eval(node.subject, frame)
        self.conditions.append(subject.sources)
        begin, before, ends, is_exhaustive = self.state, dict(frame.names), list[Ending](), False
        for case in node.cases:
            self.state, frame.names = begin, dict(before)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    frame.names[name] = item_of(subject)
            if case.guard is not None:
                self._eval(case.guard, frame)
            self._block(case.body, frame)
            ends.append((self.state, frame.names))
            is_exhaustive |= case.guard is None and isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern
        self.conditions.pop()
        self._join(ends if is_exhaustive else [*ends, (begin, before)], before, frame)
