"""The calls of `aitrain env serve`: one environment, and the episodes that clients play on it."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from aitrain.environment.call_policy import CallPolicy
from aitrain.environment.contract import Case, Transcript, call_reference
from aitrain.environment.failure_count import ABANDONED_LIMIT, FailureCount
from aitrain.environment.group_scoring import group_job
from aitrain.environment.runner import EnvRunner
from aitrain.environment.session import Group, ResetResult, SessionLike
from aitrain.environment.wire_format import (
    ALIVE_SECONDS,
    CLIENT_HEADER,
    CLIENT_SECONDS,
    TOKEN_VARIABLE,
    EnvAnswer,
    EnvCall,
    EnvDescription,
    JsonObject,
    decode,
    encode,
    env_token,
    to_wire,
    token_file,
)
from aitrain.errors import AitrainError, ConfigError
from aitrain.execution.failure import Failure
from aitrain.execution.task import Outcome
from aitrain.execution.user_code import describe_error

PAGE_ROWS, PAGE_BYTES = 1000, 4 << 20
"""Rows of one page of the dataset, and about their bytes."""
IDLE_SECONDS = 3600.0
"""Seconds without a call after which a session is ended, also if its client lives."""

T = TypeVar("T")


class RefusedRequestError(AitrainError):
    """A request that the service does not answer; `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class ClientEpisode:
    """One episode of a client, and its last call."""

    client: str
    session: SessionLike | None = None
    case: Case | None = None
    number: int = -1
    call: asyncio.Task[EnvAnswer] | None = None
    hangs: bool = False
    """Whether its last call was abandoned and is still running."""
    last_call: float = field(default_factory=time.monotonic)
    is_alone: bool = False
    """Whether no other episode may begin before it ends."""
    spoiled: Failure | None = None
    """Why its score would be wrong: another episode changed what it uses."""


@dataclass(eq=False)
class EpisodesAlone:
    """Lets one episode play while no other does."""

    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, episode: ClientEpisode, is_needed: Callable[[], bool], seconds: float) -> bool:
        """Wait for the episode before; returns whether this one may begin within these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
                episode.is_alone = True
        if episode.is_alone and not is_needed():
            self.leave(episode)
            return True
        return episode.is_alone

    def leave(self, episode: ClientEpisode) -> None:
        """Let the next episode begin; no-op for one that was not alone."""
        if episode.is_alone:
            episode.is_alone = False
            self._lock.release()


@dataclass(eq=False)
class EnvService:
    """Plays the episodes of all clients; `runner` has the environment, its threads and its processes."""

    runner: EnvRunner
    cases: Sequence[Case]
    """The cases of both datasets, by their numbers."""
    description: EnvDescription
    source: Sequence[Mapping[str, object]] = ()
    """The environment's files, each with `name` and `text`."""
    notify: Callable[[str], object] = lambda _: None

    _episodes: dict[str, ClientEpisode] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)
    _failures: FailureCount = field(default_factory=FailureCount)
    _in_order: asyncio.Lock = field(default_factory=asyncio.Lock)
    _alone: EpisodesAlone = field(default_factory=lambda: EpisodesAlone())

    # -- what clients read

    def read(self, path: str, query: dict[str, str]) -> JsonObject:
        """The answer to a GET request.

        Raises:
            RefusedRequestError: there is no such path, or no such rows.
        """
        if path == "/v1/environment":
            return asdict(replace(self.description, is_serial=self.runner.policy.is_serial))
        if path == "/v1/source":
            return {"files": list(self.source)}
        if path == "/v1/rows":
            return self._page(query.get("dataset", "train"), int(query.get("start", "0")))
        raise RefusedRequestError(404, f"there is no {path}")

    def _page(self, dataset: str, start: int) -> JsonObject:
        first, end = (0, self.description.train) if dataset == "train" else (self.description.train, len(self.cases))
        if dataset not in ("train", "held_out") or not 0 <= start <= end - first:
            raise RefusedRequestError(404, f"there are no rows {dataset} from {start}")
        rows, size, number = list[object](), 0, first + start
        while number < end and len(rows) < PAGE_ROWS and size < PAGE_BYTES:
            rows.append(to_wire(self.cases[number].row))
            size += len(json.dumps(rows[-1]))
            number += 1
        return {"environment": self.description.id, "rows": rows, "next": number - first if number < end else None}

    # -- calls

    @cached_property
    def _calls(self) -> dict[str, Callable[[ClientEpisode, EnvCall], Awaitable[EnvAnswer]]]:
        return {
            "/v1/open": self._open,
            "/v1/respond": self._respond,
            "/v1/score": self._score,
            "/v1/score_group": self._score_group,
        }

    def hear(self, client: str) -> None:
        """Note that a client lives."""
        self._heard[client] = time.monotonic()

    async def answer(self, client: str, path: str, body: JsonObject) -> bytes:
        """The answer to a POST request, as JSON.

        Raises:
            RefusedRequestError: the request is wrong.
        """
        self.hear(client)
        if path == "/v1/alive":
            return b"{}"
        if path == "/v1/close":
            episode = self._episodes.pop(str(body.get("session")), None)
            await self._end([episode] if episode else [])
            return b"{}"
        if path == "/v1/reference":
            return encode({"value": await self._reference(body.get("case_idx"), body.get("case"))})
        if path not in self._calls:
            raise RefusedRequestError(404, f"there is no {path}")
        try:
            call = decode(EnvCall, body)
        except ValueError as error:
            raise RefusedRequestError(400, f"the call cannot be read: {error}"[:500]) from error
        answer = await self._call(client, path, call)
        try:
            return encode(answer)
        except (TypeError, ValueError, RecursionError) as error:
            return encode(EnvAnswer(failure=Failure("wrong_type", f"said what cannot be written as JSON: {error}")))

    async def _call(self, client: str, path: str, call: EnvCall) -> EnvAnswer:
        """Make a call of an episode, once: one that is sent again gets the same answer."""
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
            episode = self._episodes[call.session] = ClientEpisode(client)
        if call.number > episode.number:
            episode.number, episode.last_call = call.number, time.monotonic()
            episode.call = asyncio.ensure_future(self._calls[path](episode, call))
        elif call.number < episode.number or episode.call is None:
            raise RefusedRequestError(409, f"call {call.number} of this episode was answered before")
        return await asyncio.shield(episode.call)

    async def _open(self, episode: ClientEpisode, call: EnvCall) -> EnvAnswer:
        episode.case = self._case(call)
        seconds = call.timeout or self.runner.pool.timeout
        if self.runner.plays_alone and not await self._alone.enter(episode, lambda: self.runner.plays_alone, seconds):
            return EnvAnswer(failure=Failure("raised", "meets that of another client: train with one process"))
        job = partial(self.runner.open_session, episode.case, call.seed, call.score_bounds)
        outcome: Outcome[tuple[SessionLike, ResetResult]] = await self._run(episode, job, call)
        episode.session, reset = outcome.value or (None, None)
        return _answered(outcome, reset)

    async def _respond(self, episode: ClientEpisode, call: EnvCall) -> EnvAnswer:
        if episode.session is None or call.turn is None:
            raise RefusedRequestError(400, "respond needs an open session and a turn")
        outcome = await self._run(episode, partial(episode.session.respond, call.turn), call)
        return _answered(outcome, outcome.value)

    async def _score(self, episode: ClientEpisode, call: EnvCall) -> EnvAnswer:
        transcript = Transcript(episode.case or self._case(call), call.completion)
        job = partial(self.runner.score_session, episode.session, transcript, call.score_bounds)
        async with self._in_order if self.runner.policy.is_serial and episode.session is None else nullcontext():
            outcome = await self._run(episode, job, call)
        return _answered(outcome, outcome.value)

    async def _score_group(self, episode: ClientEpisode, call: EnvCall) -> EnvAnswer:
        group = Group(self._case(call), call.members)
        async with self._in_order:  # they may compare with what earlier groups left on the environment
            outcome = await self._run(episode, group_job(self.runner, group, call.score_bounds), call)
        return _answered(outcome, outcome.value)

    async def _reference(self, case_idx: object, row: object) -> object:
        named = (case for case in self.cases if to_wire(case.case_idx) == case_idx)
        known = next((case for case in named if row in (None, to_wire(case.row))), None)
        if known is None or not self.description.has_reference:
            raise RefusedRequestError(404, f"there is no reference for case {case_idx}")
        outcome = await self.runner.pool.call(partial(call_reference, self.runner.environment, known))
        if outcome.failure is not None:
            raise RefusedRequestError(400, f"reference {outcome.failure.message}")
        return to_wire(outcome.value)

    async def _run(self, episode: ClientEpisode, job: Callable[[], T], call: EnvCall) -> Outcome[T]:
        """Make a call within its deadline; the first failure of each kind is shown."""
        outcome = await self.runner.call(job, call.timeout)
        if self.runner.may_play_alone:
            _spoil(self._episodes.values(), self.runner.policy)
        if episode.spoiled is not None:
            outcome = replace(outcome, value=None, failure=episode.spoiled)
        episode.hangs, episode.last_call = outcome.is_running, time.monotonic()
        failure: Failure | None = outcome.failure or getattr(outcome.value, "failure", None)
        if failure is not None:
            for message in self._failures.first_of_each([(failure.kind, failure.message)]):
                self.notify(f"A call of case {call.case} failed, it {message}")
        return outcome

    def _case(self, call: EnvCall) -> Case:
        if not 0 <= call.case < len(self.cases):
            raise RefusedRequestError(400, f"there is no case {call.case}")
        return self.cases[call.case]

    # -- ends

    async def end_lost(self) -> None:
        """End the sessions of clients that were not heard of, and those without a call for long."""
        now, lost = time.monotonic(), list[ClientEpisode]()
        for name, episode in list(self._episodes.items()):
            is_running = episode.call is not None and not episode.call.done()
            is_silent = now - self._heard.get(episode.client, 0.0) > CLIENT_SECONDS
            # an episode of one call is kept for a while, as the call may be sent again
            allowed = IDLE_SECONDS if episode.session is not None else CLIENT_SECONDS
            if not is_running and (is_silent or now - episode.last_call > allowed):
                del self._episodes[name]
                lost += [episode] if episode.session is not None else []
        for client, heard in list(self._heard.items()):
            if now - heard > IDLE_SECONDS:
                del self._heard[client]
        if lost:
            self.notify(f"Ended {len(lost)} episodes of clients that are gone.")
        await self._end(lost)

    async def end_all(self) -> None:
        """End all sessions; their calls are cancelled."""
        episodes, self._episodes = list(self._episodes.values()), {}
        for episode in episodes:
            if episode.call is not None:
                episode.call.cancel()
        await self._end(episodes)

    async def _end(self, episodes: Sequence[ClientEpisode]) -> None:
        """Close sessions, except those that hang (a process that hung was ended)."""
        left = [one.session for one in episodes if one.session and (self.runner.processes or not one.hangs)]
        await asyncio.gather(*(self.runner.pool.call(session.close) for session in left))
        for episode in episodes:
            self._alone.leave(episode)
        if any(episode.session is not None for episode in episodes):
            self.runner.policy.end_episodes()


def _spoil(episodes: Iterable[ClientEpisode], policy: CallPolicy) -> None:
    """Let all further calls of these episodes fail if one of them has changed something that others see."""
    failure = policy.end_batch()
    policy.begin_batch()
    for episode in episodes:
        episode.spoiled = failure or episode.spoiled


def _answered(outcome: Outcome[Any], value: object) -> EnvAnswer:
    return EnvAnswer(None if outcome.failure else value, outcome.failure, outcome.seconds)


MAX_BODY, MAX_REFUSED_BODY = 64 << 20, 1 << 16
"""Maximum bytes of a request, and of one that is refused, whose body is read only to keep the connection."""
END_SECONDS = 5.0
"""Seconds between two looks for clients that are gone."""


@dataclass(frozen=True)
class _Request:
    """The head of a request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    length: int
    """Bytes of the body, which follows."""


class EnvHttpServer:
    """Serves one environment until it is stopped."""

    def __init__(self, service: EnvService, host: str = "127.0.0.1", port: int = 0) -> None:
        self.service, self.host, self.port = service, host, port
        self.stop = asyncio.Event()
        self._has_file = not env_token()
        self._token = env_token() or secrets.token_urlsafe(32)
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, on_ready: Callable[[str], object]) -> None:
        """Serve until `stop` is set; `on_ready` is called with the URL.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            ConfigError: the token cannot be written.
        """
        server = await asyncio.start_server(self._accept, self.host, self.port, limit=1 << 16, backlog=1024)
        port = server.sockets[0].getsockname()[1]
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        try:
            if self._has_file:
                _write_token(token_file(port), self._token)
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            while not self.stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), END_SECONDS)
                await self.service.end_lost()
        finally:
            server.close()
            if self._has_file:
                token_file(port).unlink(missing_ok=True)
            await self.service.end_all()
            for connection in self._connections:
                connection.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read_head(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError, ValueError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; returns whether the connection takes another one. A request without the token is refused
        before its body is read."""
        try:
            self._check(request)
        except RefusedRequestError as error:
            is_small = 0 <= request.length <= MAX_REFUSED_BODY and "transfer-encoding" not in request.headers
            if is_small:
                await reader.readexactly(request.length)
            _send(writer, *_refusal(error))
            await writer.drain()
            return is_small
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(request.length)
        try:
            if request.method == "GET":
                _send(writer, HTTPStatus.OK, encode(self.service.read(request.path, request.query)))
            else:
                await self._answer_call(request, body, writer)
        except OSError:
            raise  # the client has gone
        except Exception as error:
            _send(writer, *_refusal(error))
        await writer.drain()
        return request.headers.get("connection", "").lower() != "close"

    async def _answer_call(self, request: _Request, received: bytes, writer: asyncio.StreamWriter) -> None:
        """Answer a call; while it waits or runs, send a space now and then, which JSON may begin with: the client sees
        that this server lives, and proxies keep the connection."""
        body = json.loads(received)
        if not isinstance(body, dict):
            raise RefusedRequestError(400, "the body is not a JSON object")
        client = request.headers.get(CLIENT_HEADER.lower(), "")
        call = asyncio.ensure_future(self.service.answer(client, request.path, body))
        done, _ = await asyncio.wait([call], timeout=ALIVE_SECONDS)
        if done:
            _send(writer, HTTPStatus.OK, call.result())
            return
        # proxies such as nginx must not hold the spaces back
        writer.write(_head(HTTPStatus.OK, "X-Accel-Buffering: no\r\nTransfer-Encoding: chunked"))
        while not done:
            writer.write(b"1\r\n \r\n")
            await writer.drain()
            self.service.hear(client)
            done, _ = await asyncio.wait([call], timeout=ALIVE_SECONDS)
        error = call.exception()
        result = call.result() if error is None else _refusal(error)[1]  # the status is sent already
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(result), result))

    def _check(self, request: _Request) -> None:
        """Refuse a request without the token, which other users of the machine and pages in a browser lack.

        Raises:
            RefusedRequestError: it is refused.
        """
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._token.encode()):
            raise RefusedRequestError(401, f"the token is wrong or missing ({TOKEN_VARIABLE})")
        if "transfer-encoding" in request.headers or not 0 <= request.length <= MAX_BODY:
            raise RefusedRequestError(413, f"send at most {MAX_BODY} bytes at once, with Content-Length")
        if request.method not in ("GET", "POST"):
            raise RefusedRequestError(405, "use GET or POST")
        if request.method == "POST" and not request.headers.get("content-type", "").startswith("application/json"):
            raise RefusedRequestError(415, "Content-Type must be application/json")


def _write_token(file: Path, token: str) -> None:
    """Write a file that only this user can read.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # of a server that was killed
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as new:
            new.write(token)
    except OSError as error:
        raise ConfigError(
            f"The server's token cannot be written to {file}: {error.strerror}\n"
            f"Set {TOKEN_VARIABLE} to a long random text, here and where the training runs."
        ) from None


async def _read_head(reader: asyncio.StreamReader) -> _Request | None:
    """The head of the next request of a connection; None if the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    parts = urlsplit(target)
    return _Request(method, parts.path, dict(parse_qsl(parts.query)), headers, int(headers.get("content-length", "0")))


def _refusal(error: BaseException) -> tuple[int, bytes]:
    """Status and body for a request that is refused, or cannot be read."""
    if isinstance(error, RefusedRequestError):
        status, message = error.status, str(error)
    elif isinstance(error, (ValueError, RecursionError)):
        status, message = 400, f"the request cannot be read: {describe_error(error)}"
    else:
        status, message = 500, describe_error(error)
    return status, encode({"error": message, "status": status})


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(_head(status, f"Content-Length: {len(body)}") + body)


def _head(status: int, framing: str) -> bytes:
    reason = HTTPStatus(status).phrase
    return f"HTTP/1.1 {int(status)} {reason}\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()
