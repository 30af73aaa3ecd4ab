"""HTTP: the addresses of servers that the user names, and servers of this process, which are starlette on uvicorn, both
imported when one starts.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aitrain.errors import AitrainError, ConfigError
from aitrain.execution.user_code import describe_error
from aitrain.redaction import redact

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response


def check_url(url: str, advice: str) -> str:
    """The URL without a slash at its end; `advice` says what to do with a key.

    Raises:
        ConfigError: it is none, or holds credentials, which belong into an environment variable.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an address in brackets, or a port, that is none
        is_one = False
    if not is_one:
        raise ConfigError(f"{url!r} is not a URL\nGive one such as http://127.0.0.1:8000.")
    if "@" in parts.netloc or redact(url) != url:
        raise ConfigError(f"the URL of {parts.hostname} holds credentials\n{advice}")
    return url.rstrip("/")


def is_local(url: str) -> bool:
    """Whether a URL leads to this machine, so that no proxy is asked."""
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


class RefusedRequestError(AitrainError, ValueError):
    """A request that is not answered; `status` is that of HTTP, and `code` that of OpenAI's errors."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


Answer = Callable[["Request"], Awaitable["Response"]]


def http_server(answer: Answer) -> uvicorn.Server:
    """A server that gives all requests to `answer`, which raises nothing. It never closes an idle connection: the
    client would not know."""
    import uvicorn
    from starlette.routing import request_response

    app = request_response(answer)
    return uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=86_400, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip


def with_token(answer: Answer, token: str) -> Answer:
    """`answer` for requests with this token, which pages in a browser and other users of the machine lack. What it
    raises becomes a response with an error in OpenAI's form."""
    from starlette.responses import JSONResponse

    async def answered(request: Request) -> Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if not hmac.compare_digest(given.encode(), token.encode()):  # before the body is read
                raise RefusedRequestError(401, "the API key or token is wrong or missing", "invalid_api_key")
            return await answer(request)
        except RefusedRequestError as error:
            refused = error
        except Exception as error:  # a client that gets no answer, or status 500, asks again
            refused = RefusedRequestError(400, f"the request failed: {describe_error(error)}")
        said = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
        return JSONResponse({"error": said}, refused.status)

    return answered
