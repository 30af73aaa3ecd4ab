"""Keeps the policy's weights loaded on one vLLM server, which may restart without them."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from aitrain.engines.weight_sync import WeightSync, WeightVersion
from aitrain.vllm.client import VLLMClient


@dataclass(eq=False)
class ServerWeights:
    """One server of a fleet, and the weights that it should have."""

    client: VLLMClient
    sync: WeightSync
    version: WeightVersion | None = None
    """The weights that it should have; None: those that it was started with."""
    restarts: int = 0
    """Number of times that it had lost the policy's weights."""
    is_live: bool = True
    """Whether requests are sent to it."""
    returns: int = 0
    """Number of times that it was gone and came back."""
    tokens: int = 0
    """Tokens in flight: of the prompts of its present requests, and the most that they may sample."""
    revival: asyncio.Task[None] | None = None
    """Waits for the return of a server that is gone."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the one request that checks the weights; all others wait for it."""
    _has_policy: bool = field(default=False, init=False)
    """Whether it had a version of the policy when it was last seen."""
    _last_check: float = field(default=-math.inf, init=False)
    """Time of the last check that found the weights."""

    @property
    def is_loading(self) -> bool:
        """Whether its weights are being checked or loaded."""
        return self._lock.locked()

    async def load(self, version: WeightVersion) -> None:
        """Load weights that were written, while no other request is sent.

        Raises:
            ServerGoneError: it is gone; `ensure_loaded` loads them when it is back.
            RunFailed: it refuses them.
        """
        async with self._lock:
            self.version = version
            was_loaded = await self.sync.unload(self.client)
            self.restarts += self._has_policy and not was_loaded
            self._has_policy = was_loaded
            await self.sync.load(self.client, version)
            self._has_policy = True

    async def ensure_loaded(self, max_age: float = 0.0) -> None:
        """Load the weights if it does not have them, unless that was checked in the last `max_age` seconds.

        Raises:
            ServerGoneError: it is gone.
            RunFailed: it refuses them, or has those of another run.
        """
        async with self._lock:
            if self.version is None or time.monotonic() < self._last_check + max_age:
                return
            if not await self.sync.has_version(self.client, self.version):
                self.restarts += self._has_policy
                self._has_policy = False
                await self.sync.load(self.client, self.version)
            self._has_policy, self._last_check = True, time.monotonic()

    async def are_loaded(self) -> bool:
        """Whether it has the weights.

        Raises:
            RunFailed: it has those of another run.
        """
        return self.version is None or await self.sync.has_version(self.client, self.version)

    def note_loaded(self, version: WeightVersion) -> None:
        """Note that another process has loaded weights; the next request checks whether this server has them."""
        self.version, self._has_policy, self._last_check = version, True, -math.inf
