"""HTTP calls of a vLLM server, each with a deadline."""

import socket
import struct
from typing import Any

import httpx

from aitrain.errors import RunFailed, ServerGoneError, ServerRefusedError
from aitrain.vllm.server_arguments import key_header

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection for each request. httpx searches all that it keeps for each request, which takes longer than a new one:
5 to 10 ms with hundreds of them."""

_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
KEEPALIVE: list[tuple[int, int, int] | tuple[int, int, bytes | bytearray]] = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _SILENCE.items() if hasattr(socket, name)),
]
"""Options of Linux's sockets that break a connection to a machine that is cut off, after 30 seconds of silence, and
free the port of a closed one at once, not after a minute: thousands of requests would use all ports."""


class VLLMClient:
    """HTTP calls with a deadline, concurrent, on any event loop."""

    def __init__(self, url: str, deadline: float = 600.0, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._deadline = deadline
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(deadline, connect=CONNECT_SECONDS),
            trust_env=False,  # no proxy
            headers=key_header(),
            transport=transport or httpx.AsyncHTTPTransport(limits=LIMITS, socket_options=KEEPALIVE, trust_env=False),
        )

    async def get(self, path: str) -> Any:
        """The content of the response; fails as `post` does."""
        return await self._call("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The content of the response.

        Raises:
            ServerGoneError: no server answers, it closed the connection, or its status is 5xx.
            ServerRefusedError: its status is 4xx.
            RunFailed: it did not answer within the deadline.
        """
        return await self._call("POST", path, json=body)

    async def is_up(self) -> bool:
        """Whether the server says within HEALTH_SECONDS that it is healthy."""
        try:
            response = await self._http.get(f"{self.url}/health", timeout=HEALTH_SECONDS)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = await self._http.request(method, f"{self.url}{path}", **content)
        except httpx.ReadTimeout:
            raise RunFailed(
                f"The vLLM server at {self.url} did not answer {path} within {self._deadline:.0f} seconds.\n"
                "See its log; smaller batches or a lower --rl-max-new-tokens take less time."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from None
        if response.status_code >= 400:
            what = f"{path}: {response.status_code}: {' '.join(response.text.split())[:500]}"
            if response.status_code >= 500:
                raise ServerGoneError(what)
            raise ServerRefusedError(f"The vLLM server at {self.url} refuses {what}", response.status_code)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text
