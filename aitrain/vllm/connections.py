"""HTTP connections that are used again. httpx's own pool costs more for each request the more connections are open."""

from __future__ import annotations

import asyncio
import socket
from functools import cached_property
from ssl import SSLContext

import httpcore
import httpx

IDLE_SECONDS = 2.0
"""For which an idle connection is kept; uvicorn, on which vLLM's server runs, closes one after 5 seconds."""

_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _SILENCE.items() if hasattr(socket, name)),
]
"""Options of Linux's sockets that break a connection to a machine that is cut off, after 30 seconds of silence."""

BROKEN = (httpcore.NetworkError, httpcore.ProtocolError)


class ReusedConnections(httpx.AsyncBaseTransport):
    """Sends each request through an idle connection, or a new one if there is none; never limits their number."""

    def __init__(self) -> None:
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        """The one that was used last comes last."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the idle connections, which no other loop can use."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response, with its content.

        Raises:
            httpx.TransportError: there is none.
        """
        if request.url.scheme not in ("http", "https") or not request.url.host:
            raise httpx.UnsupportedProtocol(f"{request.url} is not the address of a server", request=request)
        idle = await self._take_idle()
        try:
            if idle is not None:
                try:
                    return await self._send(idle, request)
                except BROKEN:
                    pass  # the server closed it at the same moment, and has not seen the request
            return await self._send(self._connect(request.url), request)
        except (*BROKEN, httpcore.TimeoutException) as error:
            kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)  # httpx has classes of these names
            raise kind(str(error), request=request) from error

    async def aclose(self) -> None:
        """Close the idle connections."""
        while await self._take_idle() is not None:
            pass

    async def _send(self, connection: httpcore.AsyncHTTPConnection, request: httpx.Request) -> httpx.Response:
        try:
            response = await connection.handle_async_request(_as_httpcore(request))
            content = await response.aread()
            await response.aclose()
        except BaseException:  # a cancelled request as well
            await connection.aclose()
            raise
        if connection.is_idle():
            self._idle.append(connection)
        return httpx.Response(response.status, headers=response.headers, content=content)

    async def _take_idle(self) -> httpcore.AsyncHTTPConnection | None:
        """The idle connection that was used last; those that have expired or that the server closed are closed."""
        if self._loop is not asyncio.get_running_loop():
            self._idle, self._loop = [], asyncio.get_running_loop()
        while self._idle and self._idle[0].has_expired():
            await self._idle.pop(0).aclose()
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    def _connect(self, url: httpx.URL) -> httpcore.AsyncHTTPConnection:
        origin = httpcore.Origin(url.raw_scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80))
        ssl_context = self._ssl_context if url.scheme == "https" else None
        return httpcore.AsyncHTTPConnection(
            origin, ssl_context, keepalive_expiry=IDLE_SECONDS, socket_options=KEEPALIVE
        )

    @cached_property
    def _ssl_context(self) -> SSLContext:
        return httpx.create_ssl_context(trust_env=False)


def _as_httpcore(request: httpx.Request) -> httpcore.Request:
    url = request.url
    address = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    return httpcore.Request(
        request.method, address, headers=request.headers.raw, content=request.stream, extensions=request.extensions
    )
