"""The failure of a call into the user's code: its kind, message, traceback and place."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from aitrain.errors import AitrainError
from aitrain.execution.user_code import failure_message

FAILURE_KINDS = ("raised", "timed_out", "crashed", "server", "wrong_type", "not_finite", "out_of_range")

_UNREACHABLE = {"ConnectionError", "ConnectError", "ConnectTimeout", "ClientConnectionError", "RemoteProtocolError"}
"""Exceptions of Python, requests, httpx and aiohttp for a server that does not answer."""


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
    is_server = any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)
    try:
        trace = "".join(traceback.format_exception(error))
        return Failure("server" if is_server else "raised", failure_message("raised", error), trace)
    except Exception:  # its __str__ raised
        return Failure("raised", f"raised: {type(error).__name__}")
