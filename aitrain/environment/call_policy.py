"""Decides how calls of an environment run by what the first ones change: at the same time, on copies, or in turn."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.state_watch import (
    CallTracer,
    CopyPlan,
    StateSnapshot,
    StateWatch,
    UnknownStateError,
    set_trace,
)
from aitrain.execution.async_calls import step_turn
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import Task, current_task, is_abandoned, paused

Notify = Callable[[str], None]
T = TypeVar("T")

WATCHED_CALLS = 3
"""Calls of `score_episode` that run alone and are watched, before calls run at the same time."""
WATCHED_EPISODES = 2
"""The same for episodes of several calls."""


# -- turns


class CallGate:
    """Lets calls run at the same time, or one alone, over all environments of the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[PolicyCall] = set()
        self._alone: PolicyCall | None = None
        self._steps_alone: PolicyCall | None = None  # the only `async def` call that takes steps
        self._pending: set[PolicyCall] = set()  # wait until they are alone, in their middle: no other begins meanwhile

    def enter(self, call: PolicyCall, wants_alone: Callable[[], bool]) -> bool:
        """Wait until a call may begin; returns whether it runs alone. `wants_alone` is asked again when others end."""

        is_alone = False

        def may_begin() -> bool:
            nonlocal is_alone
            is_alone = wants_alone()
            return not self._running if is_alone else self._alone is None and not self._pending

        with self._changed:
            self._wait(call, may_begin)
            self._running.add(call)
            self._alone = call if is_alone else None
        return is_alone

    def be_alone(self, call: PolicyCall) -> None:
        """Wait in the middle of a call until the others have ended, or wait for the same."""
        with self._changed:
            self._running.discard(call)
            self._pending.add(call)
            self._changed.notify_all()
            self._wait(call, lambda: not self._running)
            self._pending.discard(call)
            self._running.add(call)
            self._alone = call

    def may_step(self, call: PolicyCall, wants_alone: bool) -> bool:
        """Whether an `async def` call may run up to its next `await`; `wants_alone`: as the only one until it ends."""
        if self._steps_alone is None and wants_alone:
            self._steps_alone = call
        return self._steps_alone in (None, call)

    def has_steps_alone(self, call: PolicyCall) -> bool:
        """Whether other `async def` calls wait for this one."""
        return self._steps_alone is call

    def leave(self, call: PolicyCall) -> None:
        """End a call; no-op if it has ended."""
        with self._changed:
            self._running.discard(call)
            self._pending.discard(call)
            self._alone = None if self._alone is call else self._alone
            self._steps_alone = None if self._steps_alone is call else self._steps_alone
            self._changed.notify_all()

    def _wait(self, call: PolicyCall, is_ready: Callable[[], bool]) -> None:
        if not is_ready():
            with call.waiting():
                while not self._changed.wait_for(is_ready, timeout=1.0):
                    for ended in [each for each in (*self._running, *self._pending) if each.has_ended]:
                        self.leave(ended)  # its task ended in another way than by returning


_GATE = CallGate()


@dataclass(eq=False)
class PolicyCall:
    """One call under a policy. `end` may be called from elsewhere, when the call was abandoned and still runs."""

    policy: CallPolicy
    tracer: CallTracer | None = None
    task: Task[object] | None = None

    def run(self, job: Callable[[], T]) -> T:
        """Call `job` when its turn comes, and watch it."""
        if self.policy.is_free:
            return job()
        self.task = current_task.get()
        is_alone = _GATE.enter(self, lambda: self.policy.is_serial)
        try:
            if is_abandoned():
                raise CallFailed(Failure("raised", "cancelled: the result is no longer needed"))
            step_turn.set(self.wait_for_turn)  # of this call: each has a context of its own
            _current_call.set(self)
            return self.policy.watched(self, job, is_alone)
        finally:
            _GATE.leave(self)

    @property
    def has_ended(self) -> bool:
        """Whether its task has ended, or was abandoned."""
        return self.task is not None and self.task.is_done

    def be_alone(self) -> None:
        """Wait until no other call runs."""
        _GATE.be_alone(self)

    async def wait_for_turn(self) -> None:
        """Wait, on the loop of `async def` calls, while another one is to run alone."""
        if not _GATE.may_step(self, self.policy.is_serial):
            with self.waiting():
                while not _GATE.may_step(self, self.policy.is_serial):
                    await asyncio.sleep(0.002)

    def end(self) -> None:
        """Let other calls run, although this one has not ended."""
        if self.tracer is not None:
            self.tracer.abandon()
        _GATE.leave(self)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the call waits: its clock is stopped, and it does not count as running."""
        self.policy.waiting_calls += 1
        self.policy.on_wait()
        try:
            with paused():
                yield
        finally:
            self.policy.waiting_calls -= 1


_current_call: ContextVar[PolicyCall | None] = ContextVar("current_call", default=None)


def _step_alone() -> None:
    """Let the calling `async def` call be the only one that takes steps, until it ends."""
    call = _current_call.get()
    if call is not None:
        _GATE.may_step(call, wants_alone=True)


# -- the policy


@dataclass(eq=False)
class CallPolicy:
    """How the calls of one environment run.

    `by_episode`: an episode has several calls, interleaved with those of others; otherwise an episode is one call.
    `in_processes`: each call runs in a process with exclusive use of its environment.
    """

    environment: Any
    by_episode: bool
    in_processes: bool
    notify: Notify
    on_wait: Callable[[], object] = lambda: None
    """Called when a call begins to wait for others."""
    waiting_calls: int = 0
    """Calls that have a thread, and wait for others."""
    plan: CopyPlan | None = None
    """How to copy the environment for each episode; None to share it."""
    _mode: Literal["watched", "together", "serial"] = "watched"
    _left: int = 0  # calls or episodes to watch alone
    _baseline: StateSnapshot | None = None  # before the calls that run at the same time
    _loop_tracer: CallTracer | None = None

    def __post_init__(self) -> None:
        self._left = WATCHED_EPISODES if self.by_episode else WATCHED_CALLS
        self.watch = StateWatch(self.environment, self.by_episode)
        self.refresh()

    @property
    def is_free(self) -> bool:
        """Whether calls run at the same time without being watched: the class says that they may, or they have an
        environment of their own."""
        return self.in_processes or getattr(self.environment, "concurrent", False) is True

    @property
    def is_serial(self) -> bool:
        """Whether calls, or whole episodes, run one after another, in the order of their cases."""
        if self.is_free:
            return self.in_processes and self._mode == "serial"
        return self._mode != "together"

    @property
    def keeps_order(self) -> bool:
        """Whether calls run one after another for the rest of the run."""
        return self._mode == "serial" and not self.is_free

    def refresh(self) -> None:
        """Ask the servers of an environment how calls run there."""
        if isinstance(self.environment, ServedEnvironment):
            self._mode = "serial" if self.environment.is_serial() else "together"

    def object_for(self) -> object:
        """The object on which one call or one episode runs."""
        return self.environment if self.plan is None or self.in_processes else self.plan.copy_of(self.environment)

    def state(self) -> dict[str, object]:
        """How calls run, for a checkpoint; empty while that is not known."""
        if self._mode == "watched":
            return {}
        return {"mode": self._mode, "copied": None if self.plan is None else sorted(self.plan.own)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let calls run as `state` says, so that a resumed run goes on as the run that was stopped."""
        if state.get("mode") in ("together", "serial"):
            self._mode = state["mode"]
            self.plan = None if state.get("copied") is None else CopyPlan(frozenset(state["copied"]))

    # -- one call

    def watched(self, call: PolicyCall, job: Callable[[], T], is_alone: bool) -> T:
        """Call `job`, and note what it changes."""
        before = sys.gettrace()
        if self._mode == "serial":
            return job()
        if before is not None and not isinstance(before, CallTracer):
            self.watch.unknown = "a debugger or a coverage tool traces its calls"
            self._decide()
            return job()
        tracer = call.tracer = CallTracer(self.watch, call.be_alone)
        threads = threading.gettrace()
        if is_alone:
            tracer.begin_alone()
            threading.settrace(tracer)
        elif self._loop_tracer is not None:
            tracer.on_loop = self._loop_tracer
        set_trace(tracer)
        try:
            return job()
        finally:
            set_trace(None)
            if is_alone:
                threading.settrace(threads)
            tracer.end()
            self._after_call(tracer)
            if _GATE.has_steps_alone(call) and tracer.on_loop is not tracer:
                tracer.on_loop.end()
                self._after_call(tracer.on_loop)
                self._loop_tracer = CallTracer(self.watch, _step_alone)

    def _after_call(self, tracer: CallTracer) -> None:
        if not tracer.is_alone or self.by_episode or self._mode == "serial":
            return
        if self.watch.is_changed:
            self._decide()
        elif self._mode == "watched":
            self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._mode = "together"
            self.begin_batch()

    # -- batches of calls, and episodes

    def begin_batch(self) -> None:
        """Note what is, before calls that run at the same time."""
        self.refresh()
        if self.is_free or self.is_serial:
            self._baseline = None
            return
        self._loop_tracer = CallTracer(self.watch, _step_alone)
        if self._baseline is None or self._baseline.walk.has_caches or self._baseline.is_changed():
            self._baseline = self.watch.snapshot()
            if self._baseline is None:
                self._decide()

    def end_batch(self) -> Failure | None:
        """The failure of all calls since `begin_batch`, if they ran at the same time and one of them changed
        something; how later calls run is decided by that."""
        if self._loop_tracer is not None:
            self._loop_tracer.end()
            self._loop_tracer = None
        if self._baseline is None:
            return None
        is_late = self.watch.is_changed and self.by_episode
        if self._baseline.is_changed():
            is_late |= self._mode == "together" and self.watch.note(self._baseline, is_alone=False)
            self._baseline = None
        if not is_late:
            return None
        target = self.watch.reason
        self._decide("\nIt shows only now: the scores of this batch are left out, as missing data.")
        return Failure("raised", f"ran beside others, and the score may be wrong: {target}")

    def end_episodes(self) -> None:
        """Decide how episodes run, after one that was played alone."""
        self.refresh()
        if self.is_free or not self.by_episode or self._mode != "watched":
            return
        if self.watch.is_changed:
            self._decide()
        else:
            self._count()

    def _decide(self, why_now: str = "") -> None:
        """Decide how calls run, as something changes, or as that cannot be known."""
        reason = self.watch.reason
        if not self.by_episode or self.watch.unknown:
            self._run_serially(reason, "", why_now)
            return
        try:
            plan = CopyPlan.for_changes(self.environment, [*self.watch.changed, *self._copied_before()])
        except (ValueError, UnknownStateError) as error:
            self._run_serially(reason, f", as the environment cannot be copied for each: {error}", why_now)
            return
        if self.watch.first is not None and self.plan is None:
            self.watch.first.restore(self.watch.changed)
        self.plan, self._mode = plan, "together"
        self.watch.clear()
        self.notify(
            f"{reason}, and episodes run at the same time.\n"
            "Each episode therefore gets a copy of the environment as build_dataset left it, and does not see what\n"
            "others change. Local variables need no copy; with `concurrent = True` in the class episodes share it"
            f" all the same.{why_now}"
        )

    def _copied_before(self) -> list[object]:
        if self.plan is None:
            return []
        attributes = vars(self.environment)
        return [attributes, *(attributes[name] for name in self.plan.own if name in attributes)]

    def _run_serially(self, reason: str, problem: str, why_now: str) -> None:
        self._mode, self.plan, self._baseline = "serial", None, None
        what = "episodes" if self.by_episode else "calls"
        self.notify(
            f"{reason}, so {what} run one after another{problem}.\n"
            "If scores do not depend on it, write `concurrent = True` into the class. Otherwise\n"
            f"keep the data of one {what[:-1]} in local variables, or use --rl-env-isolation process.{why_now}"
        )
