"""HTTP servers of a process: starlette on uvicorn, both imported when one starts."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aitrain.errors import AitrainError

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

JsonObject = dict[str, Any]


class RefusedRequestError(AitrainError, ValueError):
    """A request that is not answered; `status` is that of HTTP, `code` and `param` are fields of OpenAI's errors."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def http_server(answer: Callable[[Request], Awaitable[Response]]) -> uvicorn.Server:
    """A server that gives all requests to `answer`. It never closes an idle connection: the client would not know."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    return uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=86_400, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip


def has_token(request: Request, token: str) -> bool:
    """Whether a request has this token, which other users of the machine and pages in a browser lack."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    return hmac.compare_digest(given, token.encode())


async def json_body(request: Request, max_bytes: int) -> JsonObject:
    """The JSON object in a request.

    Raises:
        RefusedRequestError: there is none, or it has more bytes.
    """
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > max_bytes:
            raise RefusedRequestError(413, f"a request has at most {max_bytes} bytes")
    try:
        body = json.loads(received)
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedRequestError(400, "the body is not a JSON object")
    return body
