"""Keeps the policy's weights loaded on a vLLM server, which may restart without them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aitrain import activity
from aitrain.engines.weight_sync import WeightSync, WeightVersion
from aitrain.errors import RunFailed, ServerGoneError
from aitrain.vllm.client import VLLMClient

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Seconds between two checks whether the server is back."""

ATTEMPTS = 3
"""Attempts of the same request, if the server dies during it."""


@dataclass
class ServerWeights:
    """Sends requests to a server that has the policy's weights; waits for a server that dies, and loads them again."""

    client: VLLMClient
    sync: WeightSync
    restart_timeout: float = 600.0
    """Seconds to wait for a server that is gone."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server: the reason to give up, empty to continue."""
    version: WeightVersion | None = field(default=None, init=False)
    """The weights that the server should have; None: those that it was started with."""
    restarts: int = field(default=0, init=False)
    """Number of times that the server had lost the policy's weights."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the one request that checks the server; all others wait for it."""
    _came_back: float = field(default=-math.inf, init=False)
    """Time when a server that was gone answered again."""
    _last_check: float = field(default=-math.inf, init=False)
    """Time of the last check that found the weights."""

    @property
    def loads(self) -> int:
        """Number of loads of weights, without those after restarts."""
        return 0 if self.version is None else self.version.load

    @property
    def policy(self) -> str | None:
        """The policy's model name in requests; None for that of the model that the server was started with."""
        return None if self.version is None else self.sync.model_name(self.version)

    async def load(self, version: WeightVersion) -> None:
        """Load weights that were written, while no other request is sent.

        Raises:
            RunFailed: the server does not come back, or refuses them.
        """

        async def attempt() -> None:
            was_loaded = await self.sync.unload(self.client)
            self.restarts += self.version is not None and not was_loaded
            await self.sync.load(self.client, version)

        await self._retry(attempt)
        self.version = version

    async def request(self, attempt: Callable[[], Awaitable[T]], max_age: float = 0.0) -> T:
        """The result of `attempt`, which sends requests. Before each attempt the server is checked for the weights,
        unless that was done in the last `max_age` seconds.

        Raises:
            RunFailed: the server does not come back, or fails in each attempt.
        """

        async def with_weights() -> T:
            async with self._lock:
                if self.version is not None and time.monotonic() >= self._last_check + max_age:
                    if not await self.sync.has_version(self.client, self.version):
                        self.restarts += 1
                        await self.sync.load(self.client, self.version)
                    self._last_check = time.monotonic()
            return await attempt()

        return await self._retry(with_weights)

    async def are_loaded(self) -> bool:
        """Whether the server has the weights.

        Raises:
            RunFailed: it has those of another run.
        """
        return self.version is None or await self.sync.has_version(self.client, self.version)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(ATTEMPTS):
            try:
                return await attempt()
            except ServerGoneError as gone:
                cause = str(gone)
            self._last_check = -math.inf
            await self._wait_until_up(cause)
        raise RunFailed(f"The vLLM server at {self.client.url} failed {ATTEMPTS} times at the same request: {cause}")

    async def _wait_until_up(self, cause: str) -> None:
        failed = time.monotonic()
        async with self._lock:
            if self._came_back > failed:
                return
            await asyncio.sleep(POLL_SECONDS)  # a server that dies may answer for a moment longer
            while not await self.client.is_up():
                if reason := self.give_up_reason():
                    raise RunFailed(f"The vLLM server at {self.client.url} is gone: {cause}\n{reason}")
                if time.monotonic() > failed + self.restart_timeout:
                    raise RunFailed(
                        f"The vLLM server at {self.client.url} is gone, and was not back within"
                        f" {self.restart_timeout:.0f} seconds: {cause}\nSee its log for the reason."
                    )
                await asyncio.sleep(POLL_SECONDS)
            self._came_back = time.monotonic()
        activity.tick()
