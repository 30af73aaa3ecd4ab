"""The failure of a call into the user's code: its kind, message, traceback and place; and the count of failures over a
run, which reports the first of each kind, and ends the run after too many.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from aitrain.errors import AitrainError, EnvironmentFailed, EpisodesFailed
from aitrain.execution.user_code import failure_message

FAILURE_KINDS = ("raised", "timed_out", "crashed", "server", "wrong_type", "not_finite", "out_of_range")

_TRANSPORT_ERRORS = {
    "ConnectionError",
    "ConnectError",
    "NetworkError",
    "RemoteProtocolError",
    "ClientConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "WriteTimeout",
    "PoolTimeout",
    "IncompleteRead",
    "ChunkedEncodingError",
    "ClientPayloadError",
    "APIConnectionError",
}
"""Exceptions of Python, httpx, requests, aiohttp and openai for a service that does not answer, by name, as none of
these libraries is imported here."""
_BUSY_STATUSES = (429, 502, 503, 504)
_TIMEOUTS_RAISED_IN = ("socket", "ssl", "aiohttp")
"""Modules whose plain TimeoutError is that of a connection; any other may be a deadline of the user's own."""


@dataclass(frozen=True)
class Failure:
    """Why a call failed; `kind` is one of FAILURE_KINDS, `trace` the user's traceback where there is one, and `place`
    the method that was called."""

    kind: str
    message: str
    trace: str = ""
    place: str = ""


class CallFailed(AitrainError):
    """A call whose failure is already known, such as one made in another process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def as_failure(error: BaseException) -> Failure:
    """The failure of a call that raised, with the user's own line."""
    if isinstance(error, CallFailed):
        return error.failure
    if isinstance(error, EnvironmentFailed) and error.__cause__ is not None:
        return as_failure(error.__cause__)
    try:
        kind = "server" if _is_transport_error(error) else "raised"
        return Failure(kind, failure_message("raised", error), "".join(traceback.format_exception(error)))
    except BaseException:  # its __str__ raised
        return Failure("raised", f"raised: {type(error).__name__}")


def _is_transport_error(error: BaseException) -> bool:
    """Whether a service could not be reached, timed out, or answered that it is busy; also in a group of errors, as
    that of a TaskGroup, and as the cause of another error."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_transport_error, error.exceptions))
    cause = error.__cause__ or getattr(error, "reason", None)  # the latter is that of urllib
    if isinstance(cause, BaseException) and _is_transport_error(cause):
        return True
    if type(error) is TimeoutError:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]  # none if it was only named as a cause
        return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] in _TIMEOUTS_RAISED_IN
    answers = (error, getattr(error, "response", None))
    statuses = [getattr(answer, name, None) for answer in answers for name in ("status_code", "status")]
    return any(status in _BUSY_STATUSES for status in statuses) or any(
        kind.__name__ in _TRANSPORT_ERRORS for kind in type(error).__mro__
    )


# -- the count

PATIENCE = 3
"""Consecutive batches with too many failures that end a run."""

ABANDONED_LIMIT = 64
"""Threads of hanging calls, over all processes, that end a run: they hold memory, locks and cores."""


@dataclass
class FailureCount:
    """Counts failures over a whole run: reports each kind once, and ends a run with too many."""

    max_failed: float = 1.0
    """Share of a batch that may fail (rl_max_failed)."""
    reported: dict[str, str] = field(default_factory=dict)
    """The first message of each kind of failure."""
    played: int = 0
    scored: int = 0
    bad_batches: int = 0
    """Consecutive batches without a score, or with too many failures."""
    has_noted_abandoned: bool = False
    has_noted_dropped: bool = False
    _parts: dict[str, FailureCount] = field(default_factory=dict)

    def of(self, env: str) -> FailureCount:
        """The failures of one environment of several, of which any share may fail but not all; itself without a
        name."""
        return self._parts.setdefault(env, FailureCount()) if env else self

    @property
    def first_failure(self) -> str:
        """The message of the first failure, of any environment; empty without one."""
        parts = (f"{name}: {part.first_failure}" for name, part in self._parts.items() if part.first_failure)
        return next(iter(self.reported.values()), next(parts, ""))

    def first_of_each(self, failures: Sequence[tuple[str, str]]) -> list[str]:
        """Messages of the (kind, message) pairs whose kind has not been reported in this run."""
        news = {kind: message for kind, message in reversed(failures) if kind not in self.reported}
        self.reported |= news
        return list(news.values())

    def after_batch(self, scores: int, failures: int, episodes: int) -> None:
        """Count a batch, with the sums over all processes; dropped episodes are not among `episodes`.

        Raises:
            EpisodesFailed: no episode was scored, or too many failed, in each of PATIENCE consecutive batches.
        """
        self.played += episodes
        self.scored += scores
        is_empty = not scores and (failures or not self.scored)  # a later batch may be of dropped cases only
        is_bad = is_empty or failures > self.max_failed * episodes
        self.bad_batches = self.bad_batches + 1 if is_bad else 0
        if self.bad_batches >= PATIENCE:
            raise EpisodesFailed(
                f"Too few scores in {PATIENCE} batches in a row: of {episodes} episodes of the last one {scores} were"
                f" scored, and {failures} failed.\n{self._why()}"
            )

    def after_abandoned(self, threads: int, line: str) -> str | None:
        """Check the number of threads of abandoned calls, over all processes; returns a note for the user the first
        time that there are any. `line` is that of a call that hangs.

        Raises:
            EnvironmentFailed: there are at least ABANDONED_LIMIT.
        """
        if threads >= ABANDONED_LIMIT:
            raise EnvironmentFailed(
                f"{threads} calls to the environment hang, and Python cannot end their threads. One hangs\n"
                f"{line}\n"
                "Processes can be ended: use --rl-env-isolation process."
            )
        if not threads or self.has_noted_abandoned:
            return None
        self.has_noted_abandoned = True
        return (
            "A call to the environment hangs: its thread was abandoned and keeps running. The run ends at"
            f" {ABANDONED_LIMIT} such threads; --rl-env-isolation process ends calls that hang."
        )

    def after_run(self) -> None:
        """Check that the run has scored episodes; it may have been too short for PATIENCE.

        Raises:
            EnvironmentFailed: it has not.
        """
        if self.bad_batches and not self.scored:
            raise EnvironmentFailed(f"No episode of the run was scored: there is nothing to learn from.\n{self._why()}")

    def _why(self) -> str:
        """Why episodes have no scores, for the user."""
        if not self.played:
            return (
                "All cases were dropped: no prompt leaves room for an answer in the model's context. Shorten the"
                " prompts,\nthe tools or what the environment says first, or use a model with a longer one."
            )
        if self.first_failure:
            return (
                "All failures are in rollouts/; --rl-max-failed says how many a batch may have. The first one:\n"
                f"{self.first_failure}"
            )
        return "The environment returned None, which means that an episode cannot be scored. Is a `return` missing?"
