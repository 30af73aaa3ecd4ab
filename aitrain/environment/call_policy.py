"""Decides how calls of an environment run by what they write: concurrently, each on a copy, or one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.state_analysis import analyze_state
from aitrain.environment.state_report import StateReport, WriteSite
from aitrain.environment.state_watch import StateWatch, closes_over, is_small_container, reaches

Notify = Callable[[str], None]


@dataclass(frozen=True)
class CopyPlan:
    """Which attributes a copy of an environment copies or forwards; it shares the others until it assigns its own."""

    own: frozenset[str] = frozenset()
    """Deep-copied, as calls change them in place."""
    through: frozenset[str] = frozenset()
    """Read and assigned on the original, under the environment's lock."""

    def copy_of(self, environment: object) -> object:
        """Copy the environment for one call or one episode.

        Raises:
            Exception: the environment cannot be copied.
        """
        kind, attributes = type(environment), vars(environment)
        copied = object.__new__(kind)
        memo = {id(value): value for name, value in attributes.items() if name not in self.own}
        memo[id(environment)] = copied
        for name, value in attributes.items():
            vars(copied)[name] = copy.deepcopy(value, memo) if name in self.own else value
        if self.through:
            for name in self.through:
                vars(copied).pop(name, None)
            copied.__class__ = _forwarding(environment, self.through)
        return copied

    def problem_with(self, environment: object) -> str | None:
        """Reason why an environment cannot be copied; None if it can."""
        for name in ("__slots__", "__del__"):
            if any(name in vars(owner) for owner in type(environment).__mro__[:-1]):
                return f"it has {name}"
        for name, value in vars(environment).items():
            if closes_over(value, environment):
                return f"self.{name} is a function that holds it"
        try:
            self.copy_of(environment)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:100]
        return None


def _self_references(environment: object) -> frozenset[str]:
    """Attributes from which the environment is reachable; in a copy, they must refer to the copy."""
    return frozenset(name for name, value in vars(environment).items() if reaches(value, environment))


def _forwarding(environment: object, names: frozenset[str]) -> type:
    """A subclass whose named attributes are read and assigned on this environment."""
    kind, key = type(environment), (id(environment), names)
    if key not in _FORWARDING:
        same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _FORWARDING[key] = type(kind.__name__, (kind,), {**same, **{name: _to(environment, name) for name in names}})
    return _FORWARDING[key]


_FORWARDING: dict[tuple[int, frozenset[str]], type] = {}
"""Classes by the id of their environment; they keep it alive, so that the id is not reused."""


def _to(environment: object, name: str) -> property:
    return property(
        lambda _: getattr(environment, name),
        lambda _, value: setattr(environment, name, value),
        lambda _: delattr(environment, name),
    )


# -- the policy


@dataclass
class CallPolicy:
    """How the calls of one environment run.

    `by_episode`: an episode has several calls, interleaved with those of others; otherwise an episode is one call.
    `in_processes`: each call runs in a process with exclusive use of its environment.
    """

    environment: object
    kind: str
    by_episode: bool
    in_processes: bool
    notify: Notify
    is_serial: bool = False
    """Whether calls run one at a time, in the order of their cases."""
    plan: CopyPlan | None = None
    """How to copy the environment for each call or episode; None to share it."""
    is_known: bool = True
    """Whether the decision is final; else the next batch is watched."""

    def __post_init__(self) -> None:
        if isinstance(self.environment, ServedEnvironment):  # its server copies it
            self.is_serial = self.environment.description.is_serial
        self._choose(self.report)

    @cached_property
    def report(self) -> StateReport:
        """The static analysis of the environment."""
        is_served = isinstance(self.environment, ServedEnvironment)
        return StateReport() if is_served else analyze_state(self.environment, self.kind)

    def object_for(self) -> object:
        """The object on which one call or one episode runs."""
        return self.environment if self.plan is None or self.in_processes else self.plan.copy_of(self.environment)

    @property
    def remote_plan(self) -> CopyPlan | None:
        """The copy plan for processes; None if calls have exclusive use of the environment."""
        return self.plan if self.in_processes and self.by_episode else None

    def _choose(self, report: StateReport) -> None:
        self.is_known = report.unclear is None
        if not (report.scratch or report.carried or report.unclear):
            return
        if self.by_episode:
            self._copy_for_episodes(report)
        elif report.carried:
            self._run_serially(next(iter(report.carried.values())))
        elif report.unclear is not None:
            self.is_serial = not self.in_processes  # the first batch is watched
        elif not self.in_processes:
            self._copy_for_calls(report)

    def _copy_for_calls(self, report: StateReport) -> None:
        place = next(iter(report.scratch.values()))
        plan = CopyPlan(_self_references(self.environment), _names(report.guarded))
        problem = plan.problem_with(self.environment)
        if problem is not None:
            self._run_serially(place, f"; the environment cannot be copied for each call: {problem}")
            return
        self.plan = plan
        self.notify(
            f"{_described(place)}, and calls run concurrently.\n"
            "Each call therefore gets a copy of the environment, and does not see the changes of others. A copy costs\n"
            "microseconds; with local variables none is needed."
        )

    def _run_serially(self, place: WriteSite, why: str = "", again: str = "") -> None:
        self.is_serial, self.is_known, self.plan = True, True, None
        self.notify(
            f"{_described(place)}, and other calls may read it{why}.\n"
            f"Calls therefore run one after another, and a batch takes the sum of their times.{again}\n"
            "To run them concurrently, keep the data of a call in local variables, and read and write\n"
            f"{place.target} only inside `with self.lock:` (a threading.Lock created in __init__)."
        )

    def _copy_for_episodes(self, report: StateReport) -> None:
        place = next(iter({**report.carried, **report.scratch}.values()), report.unclear)
        assert place is not None
        own = _holders(set(report.carried)) | (_small_containers(self.environment) if report.unclear else frozenset())
        plan = CopyPlan(own | _self_references(self.environment), _names(report.guarded))
        problem = plan.problem_with(self.environment)
        if problem is not None:
            self.notify(
                f"{_described(place)}, and concurrent episodes share it,\n"
                f"because the environment cannot be copied: {problem}.\n"
                "Keep the data of an episode in local variables, or let `start` return an object for each episode."
            )
            return
        self.plan = plan
        if report.carried or report.scratch:
            self.notify(
                f"{_described(place)}, and episodes run concurrently.\n"
                "Each episode therefore gets a copy of the environment as build_dataset left it, and does not see the\n"
                "changes of others. To share a value, read and write it only inside `with self.lock:` (a\n"
                "threading.Lock created in __init__); with local variables no copy is needed."
            )

    def watch(self) -> StateWatch:
        """Start watching what calls write."""
        return StateWatch(self.environment, frozenset(self.report.shared))

    def after_calls(self, watch: StateWatch) -> bool:
        """Update the policy after a batch; returns whether the batch must be repeated serially."""
        if self.is_serial and self.is_known:
            return False
        was_serial = self.is_serial
        surprises = [path for path in watch.written if path not in self.report.scratch]
        if surprises:
            again = "" if was_serial else " This batch is scored again."
            self._run_serially(self._unseen(surprises[0]), again=again)
            return not was_serial
        self.is_serial = False
        if not self.is_known and self.report.scratch:
            self._copy_for_calls(self.report)
        self.is_known = True
        return False

    def after_episodes(self, watch: StateWatch) -> None:
        """Update the policy after a batch of episodes."""
        watch.compare()
        if self.plan is None and not self.in_processes and watch.written and self.is_known:
            self.is_known = False  # reported once
            place = self._unseen(watch.written[0])
            self._copy_for_episodes(StateReport(carried={place.target: place}))

    def _unseen(self, path: str) -> WriteSite:
        return WriteSite(path, f"{type(self.environment).__name__}.{self.kind}", "", 0)


def _names(roots: set[str]) -> frozenset[str]:
    """Names of the environment's own attributes among paths such as `self.case`."""
    return frozenset(root.removeprefix("self.") for root in roots if root.count(".") == 1) & _holders(roots)


def _holders(roots: set[str]) -> frozenset[str]:
    """First attribute of each path: `game` for `self.game.moves`."""
    paths = [root.removeprefix("self.") for root in roots if root.startswith("self.") and root != "self.?"]
    return frozenset(path.partition(".")[0].partition("|")[0].removesuffix("[]") for path in paths)


def _small_containers(environment: object) -> frozenset[str]:
    attributes = getattr(environment, "__dict__", {})
    return frozenset(name for name, value in attributes.items() if is_small_container(value))


def _described(place: WriteSite) -> str:
    where = f"{Path(place.file).name}, line {place.line}" if place.file else "its source does not show where"
    return f"{place.function} changes {place.target} ({where})"
