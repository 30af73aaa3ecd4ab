"""Middleware of the vLLM servers that aitrain starts: all paths but /health need the key.

Other users of the machine reach them, too. vLLM's own check leaves out the paths of its development mode, which load
weights and call methods of its workers.
`--middleware` imports this in the server's process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aitrain.vllm.addresses import KEY_VARIABLE

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class KeyGuard:
    """An ASGI application that passes on the requests with the key of VLLM_API_KEY, and answers others with 401."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Handle one connection."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_open = scope["type"] == "lifespan" or scope.get("path") == "/health"
        if is_open or secrets.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "the key is missing or wrong"}}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
