"""The vLLM servers of a run: an episode goes to one of them. A server that is gone is waited for, and gets the weights
when it is back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from aitrain import activity
from aitrain.engines.weight_sync import WeightSync, WeightVersion
from aitrain.errors import RunFailed, ServerGoneError, ServerRefusedError
from aitrain.rollout.episode import run_all
from aitrain.vllm.client import VLLMClient

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Seconds between two checks whether a server is back."""
BACK_SECONDS = 600.0
"""Seconds to wait for a server."""
ATTEMPTS = 3
"""Attempts of a request if its server dies during it."""


@dataclass(eq=False)
class FleetServer:
    """One server of a fleet."""

    client: VLLMClient
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights are checked or loaded."""
    waiting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that looks whether it is back."""
    has_policy: bool = False
    """Whether it had a version of the policy when it was last seen."""
    restarts: int = 0
    """Number of times that it had lost the policy's weights."""
    last_check: float = -math.inf
    """Time at which the last check that found the weights began."""


@dataclass
class ServerFleet:
    """Sends requests to servers that have the policy's weights. A request of a server that dies, or that has lost the
    weights, is repeated when it is back."""

    servers: list[FleetServer]
    sync: WeightSync
    """How the weights get to the servers."""
    version: WeightVersion | None = None
    """The weights that the servers should have; None: those that they were started with."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server: the reason to give up, empty to continue."""

    @classmethod
    def of(cls, clients: Iterable[VLLMClient], sync: WeightSync) -> ServerFleet:
        """Servers that get the same weights."""
        return cls([FleetServer(client) for client in clients], sync)

    @property
    def urls(self) -> str:
        """The addresses, with commas."""
        return ", ".join(server.client.url for server in self.servers)

    @property
    def loads(self) -> int:
        """Number of loads of weights, without those after restarts."""
        return 0 if self.version is None else self.version.load

    @property
    def policy(self) -> str | None:
        """The policy's model name in requests; None for that of the model that the servers were started with."""
        return None if self.version is None else self.sync.model_name(self.version)

    @property
    def restarts(self) -> int:
        """Number of times that servers had lost the policy's weights."""
        return sum(server.restarts for server in self.servers)

    def note_loaded(self, version: WeightVersion) -> None:
        """Note that another process has loaded weights."""
        self.version = version
        for server in self.servers:
            server.has_policy, server.last_check = True, -math.inf

    async def load(self, version: WeightVersion) -> None:
        """Load weights that were written on all servers, while no other request is sent.

        Raises:
            RunFailed: a server does not come back, or refuses them.
        """
        self.version = version

        async def load_on(server: FleetServer) -> None:
            server.last_check = -math.inf
            try:
                async with server.lock:
                    was_loaded = await self.sync.unload(server.client)
                    server.restarts += server.has_policy and not was_loaded
                    server.has_policy = was_loaded
                    await self.sync.load(server.client, version)
                    server.has_policy = True
            except ServerGoneError as gone:
                await self._wait_for(server, gone)

        await run_all(map(load_on, self.servers))

    async def request(self, attempt: Callable[[FleetServer], Awaitable[T]], place: int = 0) -> T:
        """The result of `attempt`, which sends requests to a server that has the weights. Requests of one `place`, such
        as those of an episode, go to the same server, for its prefix cache.

        Raises:
            RunFailed: the server does not come back, or they fail in each attempt.
        """
        server, cause = self.servers[place % len(self.servers)], ""
        for _ in range(ATTEMPTS):
            try:
                restarts = server.restarts
                try:
                    result = await attempt(server)
                except ServerRefusedError as refused:
                    if self.policy is None or refused.status != 404:
                        raise
                    cause = str(refused)
                    await self._ensure_loaded(server)  # it has lost the adapter when it was restarted
                    continue
                if self.policy is None:  # else the request names the weights
                    await self._ensure_loaded(server, time.monotonic())
                if server.restarts == restarts:
                    return result
                cause = "it was restarted, and had lost the weights of the policy"
            except ServerGoneError as gone:
                cause = str(gone)
                await self._wait_for(server, gone)
        raise RunFailed(f"vLLM at {server.client.url} failed {ATTEMPTS} times at the same request: {cause}")

    async def close(self) -> None:
        """Remove files of weights, and close connections."""
        self.sync.close()
        for server in self.servers:
            await server.client.close()

    async def _ensure_loaded(self, server: FleetServer, since: float = math.inf) -> None:
        """Load the weights on a server that does not have them, unless a check that began after `since` found them.

        Raises:
            ServerGoneError: it is gone.
            RunFailed: it refuses them, or has those of another run.
        """
        async with server.lock:
            if self.version is None or server.last_check >= since:
                return
            start = time.monotonic()
            if not await self.sync.has_version(server.client, self.version):
                server.restarts += server.has_policy
                server.has_policy = False
                await self.sync.load(server.client, self.version)
            server.has_policy, server.last_check = True, start

    async def _wait_for(self, server: FleetServer, gone: ServerGoneError) -> None:
        """Wait until a server is back and has the weights.

        Raises:
            RunFailed: it does not come back, or refuses the weights.
        """
        start, name = time.monotonic(), f"vLLM at {server.client.url}"
        await asyncio.sleep(POLL_SECONDS)  # a server that dies may answer for a moment longer
        async with server.waiting:
            while True:
                if reason := self.give_up_reason():
                    raise RunFailed(f"{name} is gone: {gone}\n{reason}")
                if await server.client.is_up():
                    with suppress(ServerGoneError):
                        await self._ensure_loaded(server)
                        activity.tick()
                        return
                if time.monotonic() > start + BACK_SECONDS:
                    raise RunFailed(
                        f"{name} is gone, and was not back within {BACK_SECONDS:.0f} seconds: {gone}\n"
                        "See vLLM's log for the reason."
                    )
                await asyncio.sleep(POLL_SECONDS)
