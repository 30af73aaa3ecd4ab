"""What vLLM's own processes import of ours, so that it must be light: the middleware of the servers that aitrain
starts, by which all paths but /health need the key, and what workers on the CPU need to load weights.

Other users of the machine reach the servers, too. vLLM's own check leaves out the paths of its development mode, which
load weights and call methods of its workers.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aitrain.vllm.server_arguments import KEY_VARIABLE

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


class WorkerExtension:
    """Methods that vLLM's workers get (`--worker-extension-cls`), callable over /collective_rpc."""

    model_runner: Any

    def renew_tied_head(self) -> None:
        """See `renew_tied_head`."""
        renew_tied_head(self.model_runner.get_model())


def renew_tied_head(model: Any) -> None:
    """Repack the output layer of a model with tied embeddings after a reload of weights.

    On the CPU, vLLM 0.31 keeps a repacked copy of the output layer, which a reload of the embedding does not update.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
