"""Records accesses to shared state in the order of execution, with what each depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType

from aitrain.environment.abstract_values import EMPTY, UNKNOWN, Use, Value
from aitrain.environment.effects import CONTAINERS, PER_CALL_PARAMETERS
from aitrain.environment.state_report import READS, StateAccess, WriteSite
from aitrain.environment.state_watch import is_users_module, is_users_object


@dataclass
class CallFrame:
    """A function being analyzed: local variables and possible return values."""

    function: FunctionType
    owner: type | None
    names: dict[str, Value]
    declared_global: set[str] = field(default_factory=set)
    returned: list[tuple[Value, frozenset[str]]] = field(default_factory=list)


StoredRoots = frozenset[str] | None
"""Roots to which the call has assigned its own value on every path; `name!` if that value is a new object. None for
unreachable code."""


def merge_states(states: Iterable[StoredRoots]) -> StoredRoots:
    """Roots assigned on all of several paths."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


class AccessLog:
    """Records what the calls of one episode read and write, and what a call has assigned itself before."""

    def __init__(self, environment: object) -> None:
        self.environment, self.type = environment, type(environment)
        self.accesses: list[StateAccess] = []
        self.unclear: WriteSite | None = None
        self.state: StoredRoots = frozenset()
        self.at_yield: StoredRoots = None
        self.locks = 0
        self.loops = 0
        self.conditions: list[frozenset[str]] = []
        self.stack: list[object] = []
        self.calls = 0
        self.place = WriteSite("", self.type.__name__, "", 0)
        self.stored_from: dict[str, frozenset[str]] = {}
        self.computed_from: dict[str, frozenset[str] | set[str]] = {}
        self.breaks: list[list[StoredRoots]] = []
        self.referenced: set[str] | None = None
        self.is_test = False
        self.paths: dict[int, str] = {}
        self.made: dict[str, type | None] = {}
        self.stand_ins: dict[str, object] = {}

    def give_up(self, what: str) -> None:
        """Record that the analysis is incomplete."""
        self.unclear = self.unclear or replace(self.place, target=what)

    def _note(self, root: str, kind: str, depends_on: frozenset[str] | None = None) -> None:
        if self.state is None:
            return
        is_fresh = root in self.state if kind in (*READS, "store") else root + "!" in self.state
        place = replace(self.place, target=root)
        self.accesses.append(StateAccess(root, kind, place, not is_fresh, self.locks > 0, depends_on))

    def _read(self, root: str, use: Use) -> None:
        self._note(root, "look" if use == "all" else "read")

    def _store(self, root: str, value: Value, is_new: bool) -> None:
        if root == "self.?":  # the name is computed
            self._note(root, "read")
        self._note(root, "store", self._lazy_dependencies(root, value))
        if self.state is not None:
            self.stored_from[root] = value.roots
            self.made[root] = value.made or self.made.get(root)
            self.state = (self.state - {root + "!"}) | {root} | ({root + "!"} if is_new else EMPTY)

    def _change(self, roots: Iterable[str], kind: str, depends_on: frozenset[str] | None = None) -> None:
        for root in roots:
            others = self.stored_from.get(root, EMPTY) if self.state is not None and root in self.state else EMPTY
            if others:  # the call has stored a part of shared state there
                self._note(root, "read")
                self._change(others - {root}, kind, depends_on)
            else:
                self._note(root, kind, depends_on)

    def _change_process(self, root: str) -> None:
        """Record a change of process-wide state."""
        self._note(root, "read")
        self._note(root, "change")

    @contextmanager
    def _conditional(self) -> Iterator[None]:
        """Context for code that may not run: its assignments are not certain afterwards."""
        begin = self.state
        yield
        self.state = begin

    def _lazy_dependencies(self, root: str, value: Value) -> frozenset[str] | None:
        """Dependencies of an attribute that is created when a test finds it missing; None for other assignments."""
        is_tested = any(f"={root}" in condition for condition in self.conditions)
        if not is_tested or f"={root}" in value.sources or value.known is not UNKNOWN:
            return None
        return self._depends_on(Value(roots=frozenset({root})), Value(), value)

    def _depends_on(self, container: Value, key: Value, value: Value) -> frozenset[str] | None:
        """Dependencies of an item apart from its key: parameters and shared state (`=self.x`); None: its old value."""
        own = {f"={root}" for root in container.roots}
        found = self._leaves(value.sources, key)
        if found & own or not (value.sources or key == Value()):
            return None  # `self.counts[key] = self.counts[key] + 1`, or `self.seen[key] = True`
        found |= self._leaves(frozenset().union(*self.conditions), key) - own
        if "case_idx" in key.exact:
            found = {source for source in found if source in PER_CALL_PARAMETERS or source.startswith(("=", "*"))}
        return frozenset(found)

    def _leaves(self, sources: Iterable[str], key: Value) -> set[str]:
        """Parameters and shared state from which values are computed, without those that the key determines."""
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
        """A unique name for an object, independent of the path to it."""
        return self.paths.setdefault(id(held.known), "|".join(sorted(held.roots)) or type(held.known).__name__)

    def _stand_in(self, root: str, kind: type | None) -> object:
        """An uninitialized object of a class, for method lookup on an object that a call creates later."""
        if kind is None or not is_users_module(kind.__module__) or hasattr(kind, "__del__"):
            return UNKNOWN
        if root not in self.stand_ins:
            try:
                self.stand_ins[root] = object.__new__(kind)
            except TypeError:
                return UNKNOWN
        known = self.stand_ins[root]
        return known if is_users_object(known) else UNKNOWN

    def _aliases(self, value: object) -> list[str]:
        """All attributes of the environment that hold this container."""
        own = getattr(self.environment, "__dict__", {})
        return [f"self.{name}" for name, held in own.items() if held is value] if isinstance(value, CONTAINERS) else []
