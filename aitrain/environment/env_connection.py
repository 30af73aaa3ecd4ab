"""HTTP requests to a served environment, from any number of threads, over connections that are kept."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from traceback import StackSummary
from urllib.parse import SplitResult, urlsplit

from aitrain import activity
from aitrain.environment.wire_format import CLIENT_HEADER, TOKEN_VARIABLE, JsonObject, env_token
from aitrain.errors import AitrainError, ConfigError
from aitrain.execution.failure import Failure
from aitrain.execution.task import on_cancel

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 15.0
"""Seconds without a byte after which a server is lost: it sends a space every two seconds while a call runs."""
BEHIND_PROXY = (502, 503, 504)
"""Statuses with which a proxy says that it does not reach the server."""
UNAUTHORIZED, GONE = 401, 410
"""Statuses for a wrong token, and for a session that the server does not have."""


class RefusedCallError(AitrainError):
    """A server of an environment refused a request; `status` is the one of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def checked_urls(given: str) -> list[str]:
    """The URLs of a list with commas.

    Raises:
        ConfigError: one is not a URL, or holds credentials; or the token cannot be sent.
    """
    env_token()
    urls = [url.strip().rstrip("/") for url in given.split(",")]
    for url in urls:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and _port(parts) is not None and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not is_address:
            raise ConfigError(f"rl_env: {url or given} is not a URL\nGive one such as http://10.0.0.5:8000.")
        if "@" in parts.netloc:
            raise ConfigError(
                f"rl_env: the URL of {parts.hostname} holds credentials\n"
                f"Put the server's token into the environment variable {TOKEN_VARIABLE}."
            )
    return urls


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None


@dataclass
class _Cancellation:
    """Closes the connection that a call waits for, when the call is cancelled."""

    connection: http.client.HTTPConnection | None = None
    failure: Failure | None = None

    def cancel(self, failure: Failure) -> None:
        self.failure = failure
        if self.connection is not None and self.connection.sock is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class EnvConnection:
    """The connections of this process to one server."""

    url: str
    client: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this process, which the sessions belong to."""
    _idle: list[http.client.HTTPConnection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pid: int = field(default_factory=os.getpid)

    def get(self, path: str) -> JsonObject:
        """The JSON object of a path.

        Raises:
            ConnectionError: the server cannot be reached, or does not answer.
            RefusedCallError: it refuses the request.
        """
        return self._request("GET", path, None)

    def post(self, path: str, body: bytes) -> JsonObject:
        """The JSON object that a call returns.

        Raises:
            ConnectionError: the server cannot be reached, or was lost during the call.
            RefusedCallError: it refuses the call.
        """
        return self._request("POST", path, body)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> JsonObject:
        cancellation = _Cancellation()
        with on_cancel(cancellation.cancel, StackSummary):
            while True:
                connection, is_kept = self._connection()
                cancellation.connection = connection
                try:
                    return self._exchange(connection, method, path, body)
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    # the server may have closed a kept connection; calls have numbers, so that none is made twice
                    if is_kept and cancellation.failure is None and not isinstance(error, TimeoutError):
                        continue
                    what = f"did not answer for {SILENCE_SECONDS:g} s" if isinstance(error, TimeoutError) else error
                    raise ConnectionError(f"the environment's server at {self.url}: {what}") from error
                except BaseException:
                    connection.close()
                    raise

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> JsonObject:
        headers = {"Content-Type": "application/json", CLIENT_HEADER: self.client}
        if token := env_token(self.url):
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, urlsplit(self.url).path + path, body, headers)
        response, parts = connection.getresponse(), list[bytes]()
        while part := response.read1(1 << 16):
            parts.append(part)
            activity.own.tick()  # the server is alive, and has deadlines of its own
        response.close()  # else the connection takes no further request
        try:
            found = json.loads(b"".join(parts))
        except ValueError:
            found = None
        if not isinstance(found, dict) and response.status in BEHIND_PROXY:
            raise ConnectionError(f"a proxy answers with status {response.status}")
        with self._lock:
            self._idle.append(connection)
        if not isinstance(found, dict):
            raise RefusedCallError(f"{self.url}{path} does not answer in JSON: is it `aitrain env serve`?", 0)
        if response.status != http.client.OK or "error" in found:
            # a call that is refused while the server sends spaces has the status in its object only
            raise RefusedCallError(
                f"{self.url}{path}: {str(found.get('error'))[:500]}", found.get("status", response.status)
            )
        return found

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._pid != os.getpid():  # a forked process must not write to its parent's connections
                self._pid, self._idle, self.client = os.getpid(), [], uuid.uuid4().hex
            if self._idle:
                return self._idle.pop(), True
        return self._connect(), False

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", _port(parts)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_SECONDS, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ConnectionError(f"the environment's server at {self.url} cannot be reached: {error}") from error
        connection.sock.settimeout(SILENCE_SECONDS)
        return connection
