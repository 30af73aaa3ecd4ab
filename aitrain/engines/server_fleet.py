"""The vLLM servers of a run: each request goes to one that lives, and a server that returns gets the weights first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aitrain.engines.live_servers import LiveServers
from aitrain.engines.server_weights import ServerWeights
from aitrain.engines.weight_sync import WeightSync, WeightVersion
from aitrain.errors import RunFailed, ServerGoneError, ServerTimeoutError
from aitrain.rollout.episode import run_all
from aitrain.vllm.client import VLLMClient

T = TypeVar("T")

QUICK_SECONDS = 1.0
"""For the check of a server that was gone, before weights are loaded on the others."""

ATTEMPTS = 3
"""Attempts of a request if its server dies during it, and one more for each further server."""


@dataclass
class ServerFleet(LiveServers):
    """Sends requests to servers that have the policy's weights. A request of a server that dies moves to another one;
    if none lives, it waits for one."""

    _homes: dict[int, ServerWeights] | None = field(default=None, init=False)
    """The server of each episode, by its index; None outside of a batch of episodes."""

    @classmethod
    def of(cls, clients: Iterable[VLLMClient], sync: WeightSync) -> ServerFleet:
        """Servers that get the same weights."""
        return cls([ServerWeights(client, sync) for client in clients])

    @property
    def sync(self) -> WeightSync:
        """How the weights get to the servers."""
        return self.servers[0].sync

    @property
    def version(self) -> WeightVersion | None:
        """The weights that the servers should have; None: those that they were started with."""
        return self.servers[0].version

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
        for server in self.servers:
            server.note_loaded(version)

    @contextmanager
    def episodes(self) -> Iterator[None]:
        """Context in which the requests of an episode stay on one server, for its prefix cache."""
        self._homes = {}
        try:
            yield
        finally:
            self._homes = None

    async def load(self, version: WeightVersion) -> None:
        """Load weights that were written on all servers that live, while no other request is sent; the others get them
        when they are back.

        Raises:
            RunFailed: no server comes back, or one refuses them.
        """
        for server in self.servers:
            server.version = version
        await run_all(self._load_on(server, version) for server in self.servers)
        if not self.live:
            await self.wait_for_one()

    async def request(
        self,
        attempt: Callable[[ServerWeights], Awaitable[T]],
        tokens: int = 0,
        max_age: float = 0.0,
        episode: int | None = None,
    ) -> T:
        """The result of `attempt`, which sends requests to a server. Before each attempt the server is checked for the
        weights, unless that was done in the last `max_age` seconds.

        Raises:
            RunFailed: no server comes back, or they fail in each attempt.
        """
        attempts = ATTEMPTS + len(self.servers) - 1
        for number in range(attempts):
            server = await self._choose(episode)
            returns = server.returns
            server.tokens += tokens
            try:
                await server.ensure_loaded(max_age if number == 0 else 0.0)
                return await attempt(server)
            except (ServerGoneError, ServerTimeoutError) as gone:
                if not await self.is_gone(server, gone):
                    raise
                self.lose(server, returns, gone)
            finally:
                server.tokens -= tokens
        raise RunFailed(f"{self.name} failed {attempts} times at the same request: {self.cause}")

    async def close(self) -> None:
        """Remove files of weights, and close connections."""
        await self.settle()
        self.sync.close()
        for server in self.servers:
            await server.client.close()

    # -- servers that live

    async def _choose(self, episode: int | None) -> ServerWeights:
        """The episode's server if it lives, else that with the fewest tokens in flight."""
        self.look_for_lost()
        if not self.live:
            await self.wait_for_one()
        home = None if self._homes is None or episode is None else self._homes.get(episode)
        if home is None or not home.is_live:
            home = min(self.live, key=lambda server: server.tokens)
            if self._homes is not None and episode is not None:
                self._homes[episode] = home
        return home

    async def _load_on(self, server: ServerWeights, version: WeightVersion) -> None:
        if not server.is_live:
            await self.try_again(server, QUICK_SECONDS)
            return
        try:
            await server.load(version)
        except (ServerGoneError, ServerTimeoutError) as gone:
            if not await self.is_gone(server, gone):
                raise
            self.lose(server, server.returns, gone)
