"""How the calls of an environment run, by what they write: at the same time on one object, each on a copy of its own,
or one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aitrain.environment.state_analysis import analyze_state
from aitrain.environment.state_report import StateReport, WriteSite
from aitrain.environment.state_watch import StateWatch, closes_over, is_small_container, reaches

Notify = Callable[[str], None]


@dataclass(frozen=True)
class CopyPlan:
    """What a copy of an environment shares with it, by the names of attributes; everything else is shared by reference
    until the copy sets its own."""

    own: frozenset[str] = frozenset()
    """Copied deeply, as calls change them in place."""
    through: frozenset[str] = frozenset()
    """Read and set on the original, under the lock that the environment has for them."""

    def copy_of(self, environment: Any) -> Any:
        """A copy for one call or one episode.

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

    def problem_with(self, environment: Any) -> str | None:
        """Why an environment cannot be copied."""
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


def _leading_back(environment: Any) -> frozenset[str]:
    """Attributes that lead back to the environment: a copy needs ones that lead to the copy."""
    return frozenset(name for name, value in vars(environment).items() if reaches(value, environment))


def _forwarding(environment: Any, names: frozenset[str]) -> type:
    """The environment's class, with attributes that are read and set on this environment."""
    kind, key = type(environment), (id(environment), names)
    if key not in _FORWARDING:
        same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _FORWARDING[key] = type(kind.__name__, (kind,), {**same, **{name: _to(environment, name) for name in names}})
    return _FORWARDING[key]


_FORWARDING: dict[tuple[int, frozenset[str]], type] = {}
"""By the id of the environment, which each of these classes holds: no other object gets that id."""


def _to(environment: Any, name: str) -> property:
    return property(
        lambda _: getattr(environment, name),
        lambda _, value: setattr(environment, name, value),
        lambda _: delattr(environment, name),
    )


# -- the policy


@dataclass
class CallPolicy:
    """How the calls of one environment run.

    `by_episode`: episodes have several calls each, and run interleaved; otherwise an episode is one call.
    `in_processes`: each call runs in a process that has the environment to itself.
    """

    environment: Any
    level: str
    by_episode: bool
    in_processes: bool
    tell: Notify
    is_serial: bool = False
    """Whether calls run one after another, in the order of their cases."""
    plan: CopyPlan | None = None
    """How to copy the environment for each call or episode; None: they share it."""
    is_known: bool = True
    """Whether it is certain by now that calls bear each other."""

    def __post_init__(self) -> None:
        self._choose(self.report)

    @cached_property
    def report(self) -> StateReport:
        """What the source says."""
        return analyze_state(self.environment, self.level)

    def object_for(self) -> Any:
        """What one call, or one episode, runs on."""
        return self.environment if self.plan is None or self.in_processes else self.plan.copy_of(self.environment)

    @property
    def remote_plan(self) -> CopyPlan | None:
        """How a process copies the environment; calls that have it to themselves need no copy."""
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
            self.is_serial = not self.in_processes  # the first batch, under watch
        elif not self.in_processes:
            self._copy_for_calls(report)

    def _copy_for_calls(self, report: StateReport) -> None:
        place = next(iter(report.scratch.values()))
        plan = CopyPlan(_leading_back(self.environment), _names(report.guarded))
        problem = plan.problem_with(self.environment)
        if problem is not None:
            self._run_serially(place, f"; a copy for each cannot be made: {problem}")
            return
        self.plan = plan
        self.tell(
            f"{_described(place)}, and calls run at the same time.\n"
            "So each gets a copy of the environment, and none sees what another sets. That costs microseconds;\n"
            "local variables need no copy."
        )

    def _run_serially(self, place: WriteSite, why: str = "", again: str = "") -> None:
        self.is_serial, self.is_known, self.plan = True, True, None
        self.tell(
            f"{_described(place)}, and other calls may read it{why}.\n"
            f"So calls run one after another, and a batch takes the time of all of them together.{again}\n"
            "To run them at the same time, keep what belongs to one call in local variables, and read and write\n"
            f"{place.target} only inside of `with self.lock:` (a threading.Lock made in __init__)."
        )

    def _copy_for_episodes(self, report: StateReport) -> None:
        place = next(iter({**report.carried, **report.scratch}.values()), report.unclear)
        assert place is not None
        own = _holders(set(report.carried)) | (_small_containers(self.environment) if report.unclear else frozenset())
        plan = CopyPlan(own | _leading_back(self.environment), _names(report.guarded))
        problem = plan.problem_with(self.environment)
        if problem is not None:
            self.tell(
                f"{_described(place)}, and episodes that run at the same time share it,\n"
                f"as the environment cannot be copied: {problem}.\n"
                "Keep what belongs to one episode in local variables, or let `start` return an object for each episode."
            )
            return
        self.plan = plan
        if report.carried or report.scratch:
            self.tell(
                f"{_described(place)}, and episodes run at the same time.\n"
                "So each plays on a copy of the environment as build_dataset left it, and no other sees what it sets.\n"
                "To share a value, read and write it only inside of `with self.lock:` (a threading.Lock made in\n"
                "__init__); local variables need no copy."
            )

    def watch(self) -> StateWatch:
        """Of what the calls that are made from now on write."""
        return StateWatch(self.environment, frozenset(self.report.shared))

    def after_calls(self, watch: StateWatch) -> bool:
        """Learn from what a batch of calls wrote. True: they must be made again, one after another."""
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
        """Learn from what a batch of episodes wrote."""
        watch.compare()
        if self.plan is None and not self.in_processes and watch.written and self.is_known:
            self.is_known = False  # and told once
            place = self._unseen(watch.written[0])
            self._copy_for_episodes(StateReport(carried={place.target: place}))

    def _unseen(self, path: str) -> WriteSite:
        return WriteSite(path, f"{type(self.environment).__name__}.{self.level}", "", 0)


def _names(roots: set[str]) -> frozenset[str]:
    """Attributes of the environment itself among paths such as `self.case`."""
    return frozenset(root.removeprefix("self.") for root in roots if root.count(".") == 1) & _holders(roots)


def _holders(roots: set[str]) -> frozenset[str]:
    """The attributes that lead to them: `game` for `self.game.moves`."""
    paths = [root.removeprefix("self.") for root in roots if root.startswith("self.") and root != "self.?"]
    return frozenset(path.partition(".")[0].partition("|")[0].removesuffix("[]") for path in paths)


def _small_containers(environment: Any) -> frozenset[str]:
    attributes = getattr(environment, "__dict__", {})
    return frozenset(name for name, value in attributes.items() if is_small_container(value))


def _described(place: WriteSite) -> str:
    where = f"{Path(place.file).name}, line {place.line}" if place.file else "its source does not show where"
    return f"{place.function} changes {place.target} ({where})"
