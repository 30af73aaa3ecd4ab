"""The server of `aitrain env serve`: one environment, and the episodes that clients play on it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aitrain.environment.contract import Case, Transcript
from aitrain.environment.http_server import JsonObject, RefusedRequestError, http_server, json_body, with_token
from aitrain.environment.runner import EnvRunner, EnvSession
from aitrain.environment.served_environment import (
    PATIENCE,
    EnvCall,
    EnvDescription,
    decode,
    encode,
    env_token,
)
from aitrain.environment.session import Group
from aitrain.execution.failure import ABANDONED_LIMIT, Failure
from aitrain.execution.task import Outcome
from aitrain.redaction import to_jsonable

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

IDLE_SECONDS = 1800.0
"""Seconds without a call after which a session is ended: its client is gone."""
ANSWER_SECONDS = 5.0
"""Seconds after which a call that waits or runs is answered as running, so that its client sees that this server lives
and asks again."""
END_SECONDS = 5.0
"""Seconds between two looks for sessions without a call."""


@dataclass(eq=False)
class ClientEpisode(EnvSession):
    """One episode of a client, and its last call."""

    number: int = -1
    call: asyncio.Task[Outcome[Any]] | None = None
    last_call: float = field(default_factory=time.monotonic)


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

    async def serve(self, on_ready: Callable[[str], object]) -> None:
        """Serve until `stop` is set; `on_ready` is called with the URL.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            ConfigError: there is no token.
        """
        listener = socket.create_server((self.host, self.port), backlog=1024)
        host = socket.gethostname() if self.host == "0.0.0.0" else self.host
        server = http_server(with_token(self._answer, env_token(), lambda error: {"error": str(error)}))
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            on_ready(f"http://{host}:{listener.getsockname()[1]}")
            while not self.stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), END_SECONDS)
                await self.end_idle()
        finally:
            episodes, self._episodes = list(self._episodes.values()), {}
            for episode in episodes:
                if episode.call is not None:
                    episode.call.cancel()
            await self.runner.end(episodes)
            server.should_exit = True
            await serving

    async def _answer(self, request: Request) -> Response:
        from starlette.responses import Response

        if request.method == "GET":
            # in a thread, as many rows take long, and clients take a server that is silent for lost
            answer = await asyncio.to_thread(lambda: encode(self.read(request.url.path, request.query_params)))
        else:
            answer = await self.answer(request.url.path, await json_body(request))
        return Response(answer, media_type="application/json")

    # -- what clients read

    def read(self, path: str, query: Mapping[str, str]) -> JsonObject:
        """The answer to a GET request.

        Raises:
            RefusedRequestError: there is no such path, or no such rows.
        """
        if path == "/v1/environment":
            return asdict(self.description)
        count, dataset = self.description.train, query.get("dataset")
        datasets = {"train": self.cases[:count], "held_out": self.cases[count:]}
        if path != "/v1/rows" or dataset not in datasets:
            raise RefusedRequestError(404, f"there is no {path} with these arguments")
        rows = [to_jsonable(case.row, redacts=False) for case in datasets[dataset]]
        return {"environment": self.description.id, "rows": rows}

    # -- calls

    async def answer(self, path: str, body: JsonObject) -> bytes:
        """The answer to a POST request, as JSON. A call of an episode is made once: one that is sent again gets the
        same answer.

        Raises:
            RefusedRequestError: the request is wrong.
        """
        if path == "/v1/close":
            episode = self._episodes.pop(str(body.get("session")), None)
            await self.runner.end([episode] if episode else [])
            return b"{}"
        try:
            call = decode(EnvCall, body)
        except ValueError as error:
            raise RefusedRequestError(400, f"the call cannot be read: {error}"[:500]) from error
        if call.environment != self.description.id:
            what = f"({self.description.name}, {self.description.train} rows)"
            raise RefusedRequestError(409, f"this server now serves another environment {what}")
        episode = self._episodes.get(call.session)
        if episode is None:
            if call.number or path == "/v1/respond":
                raise RefusedRequestError(410, "this server does not have the episode: it was restarted, or ended it")
            if self.runner.pool.abandoned >= ABANDONED_LIMIT:
                what = f"{self.runner.pool.abandoned} calls hang at {self.runner.pool.last_hang}"
                raise RefusedRequestError(503, f"{what}: restart with --rl-env-isolation process, which ends them")
            episode = self._episodes[call.session] = ClientEpisode(self.cases[call.case], call.seed)
        if call.number > episode.number:
            episode.number, episode.last_call = call.number, time.monotonic()
            episode.call = asyncio.ensure_future(self._made(path, episode, call))
        elif call.number < episode.number or episode.call is None:
            raise RefusedRequestError(409, f"call {call.number} of this episode was answered before")
        done, _ = await asyncio.wait([episode.call], timeout=ANSWER_SECONDS)
        answer = episode.call.result() if done else Outcome(is_running=True)
        try:
            return encode(answer)
        except (TypeError, ValueError, RecursionError) as error:
            return encode(Outcome(failure=Failure("wrong_type", f"said what cannot be written as JSON: {error}")))

    async def _made(self, path: str, episode: ClientEpisode, call: EnvCall) -> Outcome[Any]:
        runner, case, session = self.runner, episode.case, episode.session
        jobs: dict[str, Callable[[], Any]] = {
            "/v1/open": partial(runner.open_session, case, episode.seed),
            "/v1/score": partial(runner.score_session, session, Transcript(case, call.completion, call.thought)),
            "/v1/score_group": partial(runner.score_members, Group(case, call.members)),
        }
        if session is not None and call.turn is not None:
            jobs["/v1/respond"] = partial(session.respond, call.turn)
        if path not in jobs:
            raise RefusedRequestError(404, f"there is no {path}; /v1/respond needs an open session and a turn")
        job = jobs[path]
        outcome = await runner.call(job, call.timeout, episode)
        episode.hangs, episode.last_call = outcome.is_running, time.monotonic()
        value = outcome.value
        if path == "/v1/open" and value is not None:
            episode.session, value = value
        return replace(outcome, value=value, is_running=False)

    # -- ends

    async def end_idle(self) -> None:
        """End the sessions that had no call for long."""
        now, idle = time.monotonic(), list[ClientEpisode]()
        for name, episode in list(self._episodes.items()):
            # an episode of one call is kept for a while, as the call may be sent again
            allowed = IDLE_SECONDS if episode.session is not None else PATIENCE
            if (episode.call is None or episode.call.done()) and now - episode.last_call > allowed:
                del self._episodes[name]
                idle.append(episode)
        await self.runner.end(idle)
