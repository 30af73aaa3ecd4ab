"""The vLLM servers of a run: each request goes to one that lives. A server that was gone and is back gets the weights
and further requests with the next batch, or at once if no other lives."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from aitrain import activity
from aitrain.engines.weight_sync import WeightSync, WeightVersion
from aitrain.errors import RunFailed, ServerGoneError, ServerRefusedError, ServerTimeoutError
from aitrain.rollout.episode import run_all
from aitrain.vllm.client import HEALTH_SECONDS, VLLMClient

T = TypeVar("T")

CURRENT_SECONDS = 1.0
"""How long a check of a server's weights holds for requests that begin: no server restarts faster."""
POLL_SECONDS = 1.0
"""Seconds between two checks whether a server is back."""
QUICK_SECONDS = 1.0
"""For the check of a server that was gone, where others live."""
ATTEMPTS = 3
"""Attempts of a request if its server dies during it, and one more for each further server."""


@dataclass(eq=False)
class FleetServer:
    """One server of a fleet."""

    client: VLLMClient
    is_live: bool = True
    """Whether requests are sent to it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights are checked or loaded."""
    has_policy: bool = False
    """Whether it had a version of the policy when it was last seen."""
    restarts: int = 0
    """Number of times that it had lost the policy's weights."""
    last_check: float = -math.inf
    """Time at which the last check that found the weights began."""


@dataclass
class ServerFleet:
    """Sends requests to servers that have the policy's weights. A request of a server that dies, or that has lost the
    weights, is repeated; if no server lives, it waits for one."""

    servers: list[FleetServer]
    sync: WeightSync
    """How the weights get to the servers."""
    version: WeightVersion | None = None
    """The weights that the servers should have; None: those that they were started with."""
    restart_timeout: float = 600.0
    """Seconds to wait for a server if none lives."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server: the reason to give up, empty to continue."""
    notify: Callable[[str], None] = lambda text: None
    """Gets a note when one of several servers is gone or back."""
    on_change: Callable[[dict[str, str]], None] = lambda states: None
    """Called when a server is gone or back, with the state of each: live or gone."""
    cause: str = field(default="", init=False)
    """Why the last request failed."""
    _refusal: RunFailed | None = field(default=None, init=False)
    """Why a server that is back cannot be used."""
    _waiting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the request that looks for a server, while no server lives."""

    @classmethod
    def of(cls, clients: Iterable[VLLMClient], sync: WeightSync) -> ServerFleet:
        """Servers that get the same weights."""
        return cls([FleetServer(client) for client in clients], sync)

    @property
    def live(self) -> list[FleetServer]:
        """The servers that requests are sent to."""
        return [server for server in self.servers if server.is_live]

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
        """Load weights that were written on all servers that live, while no other request is sent; the others get them
        when they are back.

        Raises:
            RunFailed: no server comes back, or one refuses them.
        """
        self.version = version

        async def load_on(server: FleetServer) -> None:
            server.last_check = -math.inf
            if not server.is_live:
                await self._try_again(server, QUICK_SECONDS)
                return
            try:
                async with server.lock:
                    was_loaded = await self.sync.unload(server.client)
                    server.restarts += server.has_policy and not was_loaded
                    server.has_policy = was_loaded
                    await self.sync.load(server.client, version)
                    server.has_policy = True
            except (ServerGoneError, ServerTimeoutError) as error:
                await self._lose(server, error)

        await run_all(map(load_on, self.servers))
        if not self.live:
            await self._wait_for_one()

    async def request(self, attempt: Callable[[FleetServer], Awaitable[T]], place: int = 0) -> T:
        """The result of `attempt`, which sends requests to a server that has the weights. Requests of one `place`, such
        as those of an episode, go to the same server while it lives, for its prefix cache.

        Raises:
            RunFailed: no server comes back, or they fail in each attempt.
        """
        attempts = ATTEMPTS + len(self.servers) - 1
        for _ in range(attempts):
            if not self.live:
                await self._wait_for_one()
            server = self.live[place % len(self.live)]
            try:
                if self.policy is None:  # else the request names the weights
                    await self._ensure_loaded(server, time.monotonic() - CURRENT_SECONDS)
                restarts = server.restarts
                try:
                    result = await attempt(server)
                except ServerRefusedError as refused:
                    if self.policy is None or refused.status != 404:
                        raise
                    self.cause = str(refused)
                    await self._ensure_loaded(server)  # it has lost the adapter when it was restarted
                    continue
                if self.policy is None:
                    await self._ensure_loaded(server, time.monotonic())
                if server.restarts == restarts:
                    return result
                self.cause = "it was restarted, and had lost the weights of the policy"
            except (ServerGoneError, ServerTimeoutError) as error:
                await self._lose(server, error)
        raise RunFailed(f"{self._name} failed {attempts} times at the same request: {self.cause}")

    async def look_for_lost(self) -> None:
        """Use the servers again that were gone and are back."""
        await run_all(self._try_again(server, QUICK_SECONDS) for server in self.servers if not server.is_live)

    async def close(self) -> None:
        """Remove files of weights, and close connections."""
        self.sync.close()
        for server in self.servers:
            await server.client.close()

    def report_lost(self, server: FleetServer, cause: str) -> None:
        """Tell that a server is gone, and why."""
        self.cause = cause
        left = f"{len(self.live)} of {len(self.servers)} servers left"
        self._tell(f"The vLLM server at {server.client.url} is gone, {left}: {cause}")

    @property
    def _name(self) -> str:
        return f"vLLM at {self.urls}"

    def _tell(self, text: str) -> None:
        if len(self.servers) > 1:
            self.notify(text)
            self.on_change({server.client.url: "live" if server.is_live else "gone" for server in self.servers})

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

    async def _lose(self, server: FleetServer, error: ServerGoneError | ServerTimeoutError) -> None:
        """Send no more requests to a server. One that exceeded the deadline is gone if it answers nothing at all and
        another one lives; else the error is raised."""
        if isinstance(error, ServerTimeoutError):
            has_other = any(other.is_live for other in self.servers if other is not server)
            if not has_other or await server.client.is_up():
                raise error
        self.cause = str(error)
        if server.is_live:
            server.is_live = False
            self.report_lost(server, self.cause)

    async def _try_again(self, server: FleetServer, seconds: float) -> None:
        """Use a server again if it answers within these seconds, and takes the weights."""
        if not await server.client.is_up(seconds):
            return
        try:
            await self._ensure_loaded(server)
        except ServerGoneError:
            return
        except RunFailed as refused:
            if str(refused) != str(self._refusal):
                self._tell(str(refused))
            self._refusal = refused
            return
        server.is_live = True
        self._tell(f"The vLLM server at {server.client.url} is back, and has the weights of the policy.")
        activity.tick()

    async def _wait_for_one(self) -> None:
        """Wait until a server lives.

        Raises:
            RunFailed: none comes back, or one that does refuses the weights.
        """
        start, self._refusal = time.monotonic(), None
        async with self._waiting:
            while not self.live:
                if reason := self.give_up_reason():
                    raise RunFailed(f"{self._name} is gone: {self.cause}\n{reason}")
                if time.monotonic() > start + self.restart_timeout:
                    raise RunFailed(
                        f"{self._name} is gone, and was not back within {self.restart_timeout:.0f} seconds:"
                        f" {self.cause}\nSee vLLM's log for the reason."
                    )
                await asyncio.sleep(POLL_SECONDS)  # a server that dies may answer for a moment longer
                await run_all(self._try_again(server, HEALTH_SECONDS) for server in self.servers)
                if self._refusal is not None and not self.live:
                    raise self._refusal
