"""A record of the accesses to shared state, in the order of execution, with what each of them depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from aitrain.environment.abstract_values import (
    EMPTY,
    UNKNOWN,
    Value,
)
from aitrain.environment.effects import (
    CONTAINERS,
    PER_CALL_PARAMETERS,
)
from aitrain.environment.state_report import READS, StateAccess, WriteSite
from aitrain.environment.state_watch import is_users_module, is_users_object


@dataclass
class CallFrame:
    """One function under way: its local variables and what it may return."""

    function: FunctionType
    owner: type | None
    names: dict[str, Value]
    of_class: bool = False
    declared_global: set[str] = field(default_factory=set)
    returned: list[tuple[Value, frozenset[str]]] = field(default_factory=list)


StoredRoots = frozenset[str] | None
"""Roots that the call has stored a value of its own in, whatever way it took; `name!` where that value is a new object.
None: this point is never reached."""


def merge_states(states: Iterable[StoredRoots]) -> StoredRoots:
    """What is certain after code that has gone one of several ways."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


class AccessLog:
    """Notes what calls of one episode read and write, and which of it the call has stored itself before."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.type = environment, type(environment)
        self.accesses: list[StateAccess] = []
        self.unclear: WriteSite | None = None
        self.state: StoredRoots = frozenset()
        self.at_yield: StoredRoots = None
        self.locks = 0
        self.loops = 0
        self.conditions: list[frozenset[str]] = []
        self.stack: list[Any] = []
        self.calls = 0
        self.place = WriteSite("", self.type.__name__, "", 0)
        self.stored_from: dict[str, frozenset[str]] = {}
        self.computed_from: dict[str, frozenset[str] | set[str]] = {}
        self.breaks: list[list[StoredRoots]] = []
        self.referenced: set[str] | None = None
        self.is_test = False
        self.paths: dict[int, str] = {}
        self.made: dict[str, type | None] = {}
        self.stand_ins: dict[str, Any] = {}

    def give_up(self, what: str) -> None:
        """Note that the source does not show everything."""
        self.unclear = self.unclear or replace(self.place, target=what)

    def _note(self, root: str, kind: str, hangs_on: frozenset[str] | None = None) -> None:
        if self.state is None:
            return
        is_fresh = root in self.state if kind in (*READS, "store") else root + "!" in self.state
        place = replace(self.place, target=root)
        self.accesses.append(StateAccess(root, kind, place, not is_fresh, self.locks > 0, hangs_on))

    def _store(self, root: str, value: Value, is_new: bool) -> None:
        if root == "self.?":  # a computed name
            self._note(root, "read")
        self._note(root, "store", self._when_first_needed(root, value))
        if self.state is not None:
            self.stored_from[root] = value.roots
            self.made[root] = value.made or self.made.get(root)
            self.state = (self.state - {root + "!"}) | {root} | ({root + "!"} if is_new else EMPTY)

    def _change(self, roots: Iterable[str], kind: str, hangs_on: frozenset[str] | None = None) -> None:
        for root in roots:
            others = self.stored_from.get(root, EMPTY) if self.state is not None and root in self.state else EMPTY
            if others:  # the call has put a part of something shared there
                self._note(root, "read")
                self._change(others - {root}, kind, hangs_on)
            else:
                self._note(root, kind, hangs_on)

    def _change_process(self, root: str) -> None:
        """Change something that the whole process has once."""
        self._note(root, "read")
        self._note(root, "change")

    @contextmanager
    def _perhaps(self) -> Iterator[None]:
        """Code that may not run, and whose stores therefore do not count."""
        begin = self.state
        yield
        self.state = begin

    def _when_first_needed(self, root: str, value: Value) -> frozenset[str] | None:
        """What an attribute depends on that is made where a test finds it missing; None for any other store."""
        is_tested = any(f"={root}" in condition for condition in self.conditions)
        if not is_tested or f"={root}" in value.sources or value.known is not UNKNOWN:
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
            found = {source for source in found if source in PER_CALL_PARAMETERS or source.startswith(("=", "*"))}
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

    def _path_of(self, held: Value) -> str:
        """One name for an object, by whatever way it is reached."""
        return self.paths.setdefault(id(held.known), "|".join(sorted(held.roots)) or type(held.known).__name__)

    def _stand_in(self, root: str, kind: type | None) -> Any:
        """An empty object of a class, for a shared one that a call makes later: its methods are looked up there."""
        if kind is None or not is_users_module(kind.__module__) or hasattr(kind, "__del__"):
            return UNKNOWN
        if root not in self.stand_ins:
            try:
                self.stand_ins[root] = object.__new__(kind)
            except TypeError:
                return UNKNOWN
        known = self.stand_ins[root]
        return known if is_users_object(known) else UNKNOWN

    def _aliases(self, value: Any) -> list[str]:
        """Attributes that hold the same container."""
        own = getattr(self.environment, "__dict__", {})
        return [f"self.{name}" for name, held in own.items() if held is value] if isinstance(value, CONTAINERS) else []
