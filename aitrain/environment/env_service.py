"""The server of `aitrain env serve`: one environment, and the episodes that clients play on it."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aitrain.environment.contract import Case, Transcript
from aitrain.environment.http_server import RefusedRequestError, http_server, with_token
from aitrain.environment.runner import EnvRunner, EnvSession
from aitrain.environment.served_environment import (
    EnvCall,
    EnvDescription,
    decode,
    encode,
    env_token,
)
from aitrain.environment.session import Group
from aitrain.execution.failure import ABANDONED_LIMIT, Failure
from aitrain.execution.task import Outcome

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

IDLE_SECONDS = 1800.0
"""Seconds without a call after which a session is ended: its client is gone."""
ALIVE_SECONDS = 5.0
"""Seconds between the spaces before the answer of a call that waits or runs, so that its client sees that this server
lives."""
END_SECONDS = 5.0
"""Seconds between two looks for sessions without a call."""


@dataclass(eq=False)
class ClientEpisode(EnvSession):
    """One episode of a client."""

    last_call: float = math.inf
    """The time when its last call ended; inf while one runs."""


@dataclass(eq=False)
class EnvService:
    """Serves one environment, and plays the episodes of all clients; `runner` has the environment, its threads and its
    processes."""

    runner: EnvRunner
    cases: Sequence[Case]
    """The cases of both datasets, by their numbers."""
    description: EnvDescription
    host: str = "127.0.0.1"
    port: int = 0

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the server."""
    _episodes: dict[str, ClientEpisode] = field(default_factory=dict)
    _description: bytes = b""
    """The description as JSON."""

    async def serve(self, on_ready: Callable[[str], object]) -> None:
        """Serve until `stop` is set; `on_ready` is called with the URL.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            ConfigError: there is no token.
        """
        # before there are clients, who take a server that is silent for lost: with many rows it takes long
        self._description = encode(self.description)
        listener = socket.create_server((self.host, self.port), backlog=1024)
        host = socket.gethostname() if self.host == "0.0.0.0" else self.host
        server = http_server(with_token(self._answer, env_token()))
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            on_ready(f"http://{host}:{listener.getsockname()[1]}")
            while not self.stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), END_SECONDS)
                await self.end_idle()
        finally:
            server.should_exit = True
            await serving  # which cancels the calls that run
            await self.runner.end(list(self._episodes.values()))

    async def _answer(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, Response, StreamingResponse

        if request.method == "GET":
            return Response(self._description, media_type="application/json")
        path, call = request.url.path, decode(EnvCall, await request.json())
        if path == "/v1/close":
            episode = self._episodes.pop(call.session, None)
            await self.runner.end([episode] if episode else [])
            return JSONResponse({})
        answer = self.answer(self.made(path, call))
        return StreamingResponse(answer, media_type="application/json", headers={"X-Accel-Buffering": "no"})

    # -- calls

    async def answer(self, call: Coroutine[Any, Any, Outcome[Any]]) -> AsyncIterator[bytes]:
        """The answer to a call, as JSON, with spaces before it while the call waits or runs. It is cancelled if its
        client is gone."""
        making = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([making], timeout=ALIVE_SECONDS))[0]:
                yield b" "
            yield encode(making.result())
        except (TypeError, ValueError, RecursionError) as error:
            yield encode(Outcome(failure=Failure("wrong_type", f"said what cannot be written as JSON: {error}")))
        finally:
            making.cancel()

    def made(self, path: str, call: EnvCall) -> Coroutine[Any, Any, Outcome[Any]]:
        """The call that a POST request asks for, which begins when it is awaited.

        Raises:
            RefusedRequestError: the request is wrong.
        """
        if call.environment != self.description.id:
            raise RefusedRequestError(409, "this server now serves another environment")
        runner, episode = self.runner, self._episodes.get(call.session)
        if episode is None:
            if path == "/v1/respond" or (path == "/v1/score" and runner.has_sessions):
                raise RefusedRequestError(410, "this server does not have the episode: it was restarted, or ended it")
            if runner.pool.abandoned >= ABANDONED_LIMIT:
                what = f"{runner.pool.abandoned} calls hang at {runner.pool.last_hang}"
                raise RefusedRequestError(503, f"{what}: restart with --rl-env-isolation process, which ends them")
            episode = ClientEpisode(self.cases[call.case], call.seed)
        case = episode.case
        session: Any = episode.session  # None before it is opened
        jobs: dict[str, Callable[[], Any]] = {
            "/v1/open": lambda: runner.open_session(case, call.seed),
            "/v1/respond": lambda: session.respond(call.turn),
            "/v1/score": lambda: runner.score_session(session, Transcript(case, call.completion, call.thought)),
            "/v1/score_group": lambda: runner.score_members(Group(case, call.members)),
        }
        return self._make(call, episode, jobs[path])

    async def _make(self, call: EnvCall, episode: ClientEpisode, job: Callable[[], Any]) -> Outcome[Any]:
        episode.last_call = math.inf
        try:
            outcome = await self.runner.call(job, call.timeout, episode)
        finally:  # also if its client is gone
            episode.last_call = time.monotonic()
        episode.hangs = outcome.is_running
        if not isinstance(outcome.value, tuple):
            return outcome
        episode.session, reset = outcome.value  # of open_session
        self._episodes[call.session] = episode
        return replace(outcome, value=reset)

    # -- ends

    async def end_idle(self) -> None:
        """End the sessions that had no call for long."""
        since = time.monotonic() - IDLE_SECONDS
        idle = [name for name, episode in self._episodes.items() if episode.last_call < since]
        await self.runner.end([self._episodes.pop(name) for name in idle])
