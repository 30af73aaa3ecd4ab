"""Which vLLM servers of a run live: those that are gone are looked for, and get the weights when they are back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aitrain import activity
from aitrain.engines.server_weights import ServerWeights
from aitrain.errors import RunFailed, ServerGoneError, ServerTimeoutError
from aitrain.vllm.client import HEALTH_SECONDS

POLL_SECONDS = 1.0
"""Seconds between two checks whether a server is back."""
SETTLE_SECONDS = 0.05
"""Seconds between two checks whether a server is still being loaded with weights."""


@dataclass
class LiveServers:
    """The servers of a run, and which of them live."""

    servers: list[ServerWeights]
    """In the order of preference; of equally loaded ones the first is taken."""
    restart_timeout: float = 600.0
    """Seconds to wait for a server if none lives."""
    give_up_reason: Callable[[], str] = lambda: ""
    """Called while waiting for a server: the reason to give up, empty to continue."""
    notify: Callable[[str], None] = lambda text: None
    """Gets a note when one of several servers is gone or back."""
    on_change: Callable[[dict[str, str]], None] = lambda states: None
    """Called when a server is gone or back, with the state of each: live or gone."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the one request that waits for a server; all others wait for it."""
    cause: str = field(default="", init=False)
    """Why a server is gone."""
    _refusal: RunFailed | None = field(default=None, init=False)
    """Why a server that is back cannot be used."""

    @property
    def live(self) -> list[ServerWeights]:
        """The servers that requests are sent to."""
        return [server for server in self.servers if server.is_live]

    @property
    def urls(self) -> str:
        """The addresses, with commas."""
        return ", ".join(server.client.url for server in self.servers)

    async def settle(self) -> None:
        """Stop waiting for servers that are gone, and wait for those that are getting the weights. Called before other
        weights are written."""
        for server in self.servers:
            while (task := server.revival) is not None and not task.done():
                if not server.is_loading:
                    task.cancel()
                await asyncio.wait([task], timeout=SETTLE_SECONDS)  # after a refused load it would be tried again
            server.revival = None

    @property
    def name(self) -> str:
        """The servers as the subject of a sentence."""
        return f"The vLLM server{'s' if len(self.servers) > 1 else ''} at {self.urls}"

    async def is_gone(self, server: ServerWeights, error: ServerGoneError | ServerTimeoutError) -> bool:
        """Whether a request failed because its server is gone. One that has exceeded the deadline is, if it answers
        nothing at all and another one lives."""
        if isinstance(error, ServerGoneError):
            return True
        has_other = any(other.is_live for other in self.servers if other is not server)
        return has_other and not await server.client.is_up()

    def lose(self, server: ServerWeights, returns: int, gone: ServerGoneError | ServerTimeoutError) -> None:
        """Send no more requests to a server, unless it has come back since the request that failed."""
        self.cause = str(gone)
        if server.is_live and server.returns == returns:
            server.is_live = False
            self.report_lost(server, self.cause)

    def report_lost(self, server: ServerWeights, cause: str) -> None:
        """Tell that a server is gone, and why."""
        self.cause = cause
        left = f"{len(self.live)} of {len(self.servers)} servers left"
        self._tell(f"The vLLM server at {server.client.url} is gone, {left}: {cause}")

    def look_for_lost(self) -> None:
        """Wait for the return of each server that is gone, beside the requests to the others."""
        for server in self.servers:
            if not server.is_live and (server.revival is None or server.revival.done()):
                server.revival = asyncio.create_task(self._revive(server))

    async def _revive(self, server: ServerWeights) -> None:
        while not server.is_live:
            await asyncio.sleep(POLL_SECONDS)  # a server that dies may answer for a moment longer
            await self.try_again(server, HEALTH_SECONDS)

    async def try_again(self, server: ServerWeights, seconds: float) -> None:
        """Use a server again if it answers within these seconds, and takes the weights."""
        if not await server.client.is_up(seconds):
            return
        try:
            await server.ensure_loaded()
        except ServerGoneError:
            return
        except RunFailed as refused:
            if str(refused) != str(self._refusal):
                self._tell(str(refused))
            self._refusal = refused
            return
        server.is_live = True
        server.returns += 1
        self._tell(f"The vLLM server at {server.client.url} is back, and has the weights of the policy.")
        activity.tick()

    def _tell(self, text: str) -> None:
        if len(self.servers) > 1:
            self.notify(text)
            self.on_change({server.client.url: "live" if server.is_live else "gone" for server in self.servers})

    async def wait_for_one(self) -> None:
        """Wait until a server lives.

        Raises:
            RunFailed: none comes back, or one that does refuses the weights.
        """
        failed, are, none_was = time.monotonic(), "is", "was not"
        if len(self.servers) > 1:
            are, none_was = "are", "none was"
        async with self._lock:
            self._refusal = None
            while not self.live:
                self.look_for_lost()
                if self._refusal is not None:
                    raise self._refusal
                if reason := self.give_up_reason():
                    raise RunFailed(f"{self.name} {are} gone: {self.cause}\n{reason}")
                if time.monotonic() > failed + self.restart_timeout:
                    raise RunFailed(
                        f"{self.name} {are} gone, and {none_was} back within {self.restart_timeout:.0f} seconds:"
                        f" {self.cause}\nSee vLLM's log for the reason."
                    )
                revivals = [server.revival for server in self.servers if server.revival is not None]
                await asyncio.wait(revivals, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
