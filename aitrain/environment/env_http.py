"""The HTTP server of `aitrain env serve`: one event loop for all connections, which are kept."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from aitrain.environment.env_service import EnvService, RefusedRequestError
from aitrain.environment.wire_format import (
    ALIVE_SECONDS,
    CLIENT_HEADER,
    TOKEN_VARIABLE,
    encode,
    env_token,
    token_file,
)
from aitrain.errors import ConfigError
from aitrain.execution.user_code import describe_error

MAX_BODY, MAX_REFUSED_BODY = 64 << 20, 1 << 16
"""Maximum bytes of a request, and of one that is refused, whose body is read only to keep the connection."""
END_SECONDS = 5.0
"""Seconds between two looks for clients that are gone."""


@dataclass(frozen=True)
class _Request:
    """The head of a request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    length: int
    """Bytes of the body, which follows."""


class EnvHttpServer:
    """Serves one environment until it is stopped."""

    def __init__(self, service: EnvService, host: str = "127.0.0.1", port: int = 0) -> None:
        self.service, self.host, self.port = service, host, port
        self.stop = asyncio.Event()
        self._has_file = not env_token()
        self._token = env_token() or secrets.token_urlsafe(32)
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, on_ready: Callable[[str], object]) -> None:
        """Serve until `stop` is set; `on_ready` is called with the URL.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            ConfigError: the token cannot be written.
        """
        server = await asyncio.start_server(self._accept, self.host, self.port, limit=1 << 16, backlog=1024)
        port = server.sockets[0].getsockname()[1]
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        try:
            if self._has_file:
                _write_token(token_file(port), self._token)
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            while not self.stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), END_SECONDS)
                await self.service.end_lost()
        finally:
            server.close()
            if self._has_file:
                token_file(port).unlink(missing_ok=True)
            await self.service.end_all()
            for connection in self._connections:
                connection.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read_head(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError, ValueError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; returns whether the connection takes another one. A request without the token is refused
        before its body is read."""
        try:
            self._check(request)
        except RefusedRequestError as error:
            is_small = 0 <= request.length <= MAX_REFUSED_BODY and "transfer-encoding" not in request.headers
            if is_small:
                await reader.readexactly(request.length)
            _send(writer, *_refusal(error))
            await writer.drain()
            return is_small
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(request.length)
        try:
            if request.method == "GET":
                _send(writer, HTTPStatus.OK, encode(self.service.read(request.path, request.query)))
            else:
                await self._answer_call(request, body, writer)
        except OSError:
            raise  # the client has gone
        except Exception as error:
            _send(writer, *_refusal(error))
        await writer.drain()
        return request.headers.get("connection", "").lower() != "close"

    async def _answer_call(self, request: _Request, received: bytes, writer: asyncio.StreamWriter) -> None:
        """Answer a call; while it waits or runs, send a space now and then, which JSON may begin with: the client sees
        that this server lives, and proxies keep the connection."""
        body = json.loads(received)
        if not isinstance(body, dict):
            raise RefusedRequestError(400, "the body is not a JSON object")
        client = request.headers.get(CLIENT_HEADER.lower(), "")
        call = asyncio.ensure_future(self.service.answer(client, request.path, body))
        done, _ = await asyncio.wait([call], timeout=ALIVE_SECONDS)
        if done:
            _send(writer, HTTPStatus.OK, call.result())
            return
        # proxies such as nginx must not hold the spaces back
        writer.write(_head(HTTPStatus.OK, "X-Accel-Buffering: no\r\nTransfer-Encoding: chunked"))
        while not done:
            writer.write(b"1\r\n \r\n")
            await writer.drain()
            self.service.hear(client)
            done, _ = await asyncio.wait([call], timeout=ALIVE_SECONDS)
        error = call.exception()
        result = call.result() if error is None else _refusal(error)[1]  # the status is sent already
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(result), result))

    def _check(self, request: _Request) -> None:
        """Refuse a request without the token, which other users of the machine and pages in a browser lack.

        Raises:
            RefusedRequestError: it is refused.
        """
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._token.encode()):
            raise RefusedRequestError(401, f"the token is wrong or missing ({TOKEN_VARIABLE})")
        if "transfer-encoding" in request.headers or not 0 <= request.length <= MAX_BODY:
            raise RefusedRequestError(413, f"send at most {MAX_BODY} bytes at once, with Content-Length")
        if request.method not in ("GET", "POST"):
            raise RefusedRequestError(405, "use GET or POST")
        if request.method == "POST" and not request.headers.get("content-type", "").startswith("application/json"):
            raise RefusedRequestError(415, "Content-Type must be application/json")


def _write_token(file: Path, token: str) -> None:
    """Write a file that only this user can read.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # of a server that was killed
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as new:
            new.write(token)
    except OSError as error:
        raise ConfigError(
            f"The server's token cannot be written to {file}: {error.strerror}\n"
            f"Set {TOKEN_VARIABLE} to a long random text, here and where the training runs."
        ) from None


async def _read_head(reader: asyncio.StreamReader) -> _Request | None:
    """The head of the next request of a connection; None if the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    parts = urlsplit(target)
    return _Request(method, parts.path, dict(parse_qsl(parts.query)), headers, int(headers.get("content-length", "0")))


def _refusal(error: BaseException) -> tuple[int, bytes]:
    """Status and body for a request that is refused, or cannot be read."""
    if isinstance(error, RefusedRequestError):
        status, message = error.status, str(error)
    elif isinstance(error, (ValueError, RecursionError)):
        status, message = 400, f"the request cannot be read: {describe_error(error)}"
    else:
        status, message = 500, describe_error(error)
    return status, encode({"error": message, "status": status})


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(_head(status, f"Content-Length: {len(body)}") + body)


def _head(status: int, framing: str) -> bytes:
    reason = HTTPStatus(status).phrase
    return f"HTTP/1.1 {int(status)} {reason}\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()
