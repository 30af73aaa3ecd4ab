"""The failure of a call into the user's code: its kind, message, traceback and place."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from aitrain.errors import AitrainError
from aitrain.execution.user_code import failure_message

FAILURE_KINDS = ("raised", "timed_out", "crashed", "server", "wrong_type", "not_finite", "out_of_range")

_TRANSPORT_ERRORS = {
    *("ConnectionError", "ConnectError", "NetworkError", "RemoteProtocolError", "ClientConnectionError"),
    *("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"),
    *("IncompleteRead", "ChunkedEncodingError", "ClientPayloadError", "APIConnectionError"),
}
"""Exceptions of Python, httpx, requests, aiohttp and openai for a service that does not answer, by name, as none of
these libraries is imported here."""
_BUSY_STATUSES = (429, 502, 503, 504)
_TIMEOUTS_RAISED_IN = ("socket", "ssl", "aiohttp")
"""Modules whose plain TimeoutError is that of a connection; any other may be a deadline of the user's own."""


@dataclass(frozen=True)
class Failure:
    """Why a call failed; `kind` is one of FAILURE_KINDS, `trace` the user's traceback where there is one, and `place`
    the method or tool that failed."""

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
    try:
        kind = "server" if _is_transport_error(error) else "raised"
        return Failure(kind, failure_message("raised", error), "".join(traceback.format_exception(error)))
    except Exception:  # its __str__ raised
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
    is_busy = any(status == busy for status in statuses for busy in _BUSY_STATUSES)
    return is_busy or any(kind.__name__ in _TRANSPORT_ERRORS for kind in type(error).__mro__)
