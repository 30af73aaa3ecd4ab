"""Decides how calls of an environment run by what the first ones change: at the same time, on copies, or in turn."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from aitrain.environment.state_watch import (
    CallTracer,
    StateWatch,
    attributes_to_copy,
    copy_of,
)
from aitrain.execution.failure import Failure

Notify = Callable[[str], None]
T = TypeVar("T")

WATCHED = 2
"""Calls or episodes that run alone and are watched, before others run at the same time."""
RAN_BESIDE = "ran beside others, and the score may be wrong"
"""Failure of the calls of a batch in which one changed what others see."""


@dataclass(eq=False)
class CallPolicy:
    """How the calls of one environment run.

    `by_episode`: an episode has several calls, interleaved with those of others; otherwise an episode is one call.
    `is_watched`: calls share an environment in this process, and the user has not declared concurrent calls safe.
    """

    environment: Any
    by_episode: bool
    is_watched: bool
    notify: Notify
    own: frozenset[str] | None = None
    """Names of the attributes of which each episode gets a copy, with the environment; None: all share it."""
    _mode: Literal["free", "watched", "together", "serial"] = "free"
    """How calls run: free, at the same time and not watched; watched, one after another until it is known what they
    change; together, at the same time and watched; serial, one after another, as they change something."""

    def __post_init__(self) -> None:
        if self.is_watched and getattr(self.environment, "concurrent", False) is not True:
            self._mode = "watched"
        # to run alone: the first call is not watched, as it may make what later ones use, such as a client
        self._left = WATCHED if self.by_episode else WATCHED + 1
        self._watch = StateWatch(self.environment)

    @property
    def is_serial(self) -> bool:
        """Whether calls, or whole episodes, run one after another, in the order of their cases."""
        return self._mode in ("watched", "serial")

    def object_for(self) -> object:
        """The object on which one call or one episode runs."""
        return self.environment if self.own is None else copy_of(self.environment, self.own)

    def state(self) -> dict[str, object]:
        """How calls run, for a checkpoint; empty while that is not known. Without it, a resumed run would play its
        first episodes alone, and a batch of other episodes may sample other tokens."""
        if self._mode in ("free", "watched"):
            return {}
        return {"mode": self._mode, "copied": None if self.own is None else sorted(self.own)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let calls run as `state` says, so that a resumed run goes on as the run that was stopped."""
        if state and self._mode != "free":
            self._mode, copied = state["mode"], state.get("copied")
            self.own = None if copied is None else frozenset(copied)

    def run(self, job: Callable[[], T], episode: object = None) -> T:
        """Call `job`, and note what it changes. As long as calls are watched one by one, no other may run. `episode`:
        that of the call, as several calls of an episode may write one file; None: the call is one of its own."""
        if self._mode in ("free", "serial"):
            return job()
        if self._mode == "watched" and self._left > WATCHED:
            self._left -= 1
            return job()
        before = sys.gettrace()
        if before is not None and not isinstance(before, CallTracer):
            self._watch.give_up("a debugger or a coverage tool traces its calls")
            self._decide()
            return job()
        is_alone = self._mode == "watched"
        try:
            with CallTracer(self._watch, is_alone, episode):
                return job()
        finally:
            if is_alone and not self.by_episode:
                self._after_watched()

    def _after_watched(self) -> None:
        """Decide how calls run, after one call or episode that ran alone."""
        self._left -= 1
        if self._watch.reason:
            self._decide()
        elif self._left <= 0:
            self._mode = "together"
            self.begin_batch()

    def begin_batch(self) -> None:
        """Note what is, before calls that run at the same time."""
        if self._mode != "together":
            return
        watch = self._watch
        watch.files.clear()
        if watch.before is None or watch.before.has_caches or watch.changes():
            watch.look_before()
        if watch.reason:
            self._decide()

    def end_batch(self) -> Failure | None:
        """The failure of all calls since `begin_batch`, if they ran at the same time and one of them changed
        something; how later calls run is decided by that."""
        if self._mode != "together" or self._watch.before is None:
            return None
        self._watch.compare()
        if not (reason := self._watch.reason):
            return None
        self._decide("\nIt shows only now: the scores of this batch are left out, as missing data.")
        return Failure("raised", f"{RAN_BESIDE}: {reason}")

    def end_episodes(self) -> None:
        """Decide how episodes run, after one that was played alone."""
        if self.by_episode and self._mode == "watched":
            self._after_watched()

    def _decide(self, why_now: str = "") -> None:
        """Decide how calls run, as something changes, or as that cannot be known."""
        watch, problem = self._watch, ""
        if self.by_episode and watch.before is not None and watch.is_separable:
            changed, attributes = watch.objects + watch.changes(), vars(self.environment)
            if self.own is not None:  # what was copied before stays so
                changed += [attributes, *(value for name, value in attributes.items() if name in self.own)]
            try:
                own = attributes_to_copy(self.environment, changed)
                if own == self.own:
                    raise ValueError("the environment itself is changed")
                watch.before.restore()
            except Exception as error:  # also of a class of the user's
                problem = f", as the environment cannot be copied for each: {error}"
            else:
                if self.own is None or why_now:
                    self.notify(
                        f"{watch.reason}, and episodes run at the same time.\n"
                        "Each episode therefore gets a copy of the environment as build_dataset left it, and does not"
                        " see what\nothers change. Local variables need no copy; with `concurrent = True` in the class"
                        f" episodes share it all the same.{why_now}"
                    )
                self.own, self._mode, self._left = own, "watched", WATCHED  # until nothing else changes
                watch.clear()
                return
        self._mode, self.own = "serial", None
        what = "episodes" if self.by_episode else "calls"
        self.notify(
            f"{watch.reason}, so {what} run one after another{problem}.\n"
            "If scores do not depend on it, write `concurrent = True` into the class. Otherwise\n"
            f"keep the data of one {what[:-1]} in local variables, or use --rl-env-isolation process.{why_now}"
        )
