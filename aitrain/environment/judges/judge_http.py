"""HTTP requests to judges: retried with growing pauses; one that fails for good is missing data."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from aitrain.environment.judges.asking import is_offline, not_asked
from aitrain.errors import ConfigError
from aitrain.execution.failure import CallFailed, Failure
from aitrain.redaction import redact

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a request is repeated; doubled each time, unless the server says how long to wait."""
CONNECT_SECONDS = 10.0
BUSY = {408, 409, 425, 429}
"""Statuses below 500 that pass."""


@dataclass(frozen=True, kw_only=True)
class JudgeServer:
    """Where a judge is, and how it is asked."""

    url: str
    key_name: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key, which is sent if it is set."""
    timeout: float = 30.0
    """Seconds for one request."""
    retries: int = 3
    """How often a request that fails is repeated."""
    concurrency: int = 16
    """Requests that each process makes at the same time."""

    def __post_init__(self) -> None:
        self.check()
        if is_offline():
            not_asked.add(self.url)

    def check(self) -> None:
        """Check the address and the numbers.

        Raises:
            ConfigError: one is wrong.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"judges: {self.url!r} is not a URL\nGive one such as http://127.0.0.1:8000/v1.")
        if "@" in parts.netloc or redact(self.url) != self.url:
            raise ConfigError(
                f"judges: the URL of {parts.hostname} holds credentials\nPut the key into the environment variable"
                f" {self.key_name}; key_name names another one."
            )
        for name, lowest in (("timeout", 0.001), ("retries", 0), ("concurrency", 1)):
            if not getattr(self, name) >= lowest:
                raise ConfigError(f"judges: {name} must be at least {lowest}, not {getattr(self, name)}")

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """What the server answers, as JSON.

        Raises:
            CallFailed: it refuses the request, or fails it `retries + 1` times; the kind is `server` or `timed_out`.
        """
        url, pause, failure = self.url.rstrip("/") + path, FIRST_PAUSE, Failure("server", "")
        connections = _Connections.of_running_loop()
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(pause, LONGEST_PAUSE))
                pause *= 2
            try:
                async with connections.slots(url, self.concurrency), asyncio.timeout(self.timeout):
                    response = await connections.client.post(url, json=body, headers=self._headers())
            except TimeoutError:
                failure = Failure("timed_out", f"the judge at {self.url} did not answer within {self.timeout:g} s")
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                what = redact(f"{type(error).__name__}: {error}")
                failure = Failure("server", f"the judge at {self.url} cannot be reached: {what}")
                continue
            if response.status_code < 300:
                return self._json(response)
            failure = Failure("server", self._refusal(response))
            if response.status_code < 500 and response.status_code not in BUSY:
                break
            pause = max(pause, _retry_after(response))
        raise CallFailed(failure)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key_name, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise CallFailed(Failure("raised", f"the variable {self.key_name} has characters that no key can have"))
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            shown = redact(" ".join(response.text[:200].split()))
            raise CallFailed(Failure("server", f"the judge at {self.url} does not answer in JSON: {shown}")) from None

    def _refusal(self, response: httpx.Response) -> str:
        advice = {
            401: f"Put the key into the environment variable {self.key_name}.",
            403: f"Put a key that may use it into the environment variable {self.key_name}.",
            404: "Check the address, which often ends in /v1, and the name of the model.",
        }.get(response.status_code, "")
        said = redact(" ".join(response.text[:300].split()))
        return f"the judge at {self.url} answers with status {response.status_code}: {said}\n{advice}".rstrip()


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0


def _client() -> httpx.AsyncClient:
    """A client without httpx's own limits: that of the time is for each piece of an answer."""
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), limits=httpx.Limits())


@dataclass
class _Connections:
    """The connections of one event loop; a forked process has a loop of its own."""

    client: httpx.AsyncClient = field(default_factory=_client)
    _slots: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict)

    @classmethod
    def of_running_loop(cls) -> _Connections:
        """Those of the calling task's loop."""
        loop = asyncio.get_running_loop()
        if loop not in _of_loop:
            _of_loop[loop] = cls()
        return _of_loop[loop]

    def slots(self, url: str, count: int) -> asyncio.Semaphore:
        """Limits the requests at the same time to an address."""
        return self._slots.setdefault((url, count), asyncio.Semaphore(count))


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = weakref.WeakKeyDictionary()
