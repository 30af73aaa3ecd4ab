"""What keeps an episode from having a score: its kind, and how it is told with the user's own lines."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from aitrain.environment.loader import failure_message
from aitrain.errors import AitrainError

FAILURE_KINDS = ("raised", "timed_out", "crashed", "server", "wrong_type", "not_finite", "out_of_range")

_UNREACHABLE = {"ConnectionError", "ConnectError", "ConnectTimeout", "ClientConnectionError", "RemoteProtocolError"}
"""What Python, requests, httpx and aiohttp call a server that does not answer."""


@dataclass(frozen=True)
class Failure:
    """Why an episode has no score; `kind` is one of FAILURE_KINDS, `trace` the user's traceback where there is one, and
    `place` the method or tool that it happened in."""

    kind: str
    message: str
    trace: str = ""
    place: str = ""


class CallFailed(AitrainError):
    """A call whose failure is known already, such as one in another process."""

    def __init__(self, failure_message: Failure) -> None:
        super().__init__(failure_message.message)
        self.failure = failure_message


def as_failure(error: BaseException) -> Failure:
    """An error that the environment's code raised, with the user's own line."""
    if isinstance(error, CallFailed):
        return error.failure
    is_server = any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)
    trace = "".join(traceback.format_exception(error))
    return Failure("server" if is_server else "raised", failure_message("raised", error), trace)
