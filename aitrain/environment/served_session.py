"""An episode of an environment that servers have, and on which of the servers it is played."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aitrain.environment.env_connection import GONE, EnvConnection, RefusedCallError
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, ResetResult
from aitrain.environment.wire_format import CLIENT_SECONDS, EnvAnswer, EnvCall, JsonObject, decode, encode
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import current_task, is_abandoned, paused

RETRY_SECONDS = 0.5
"""Seconds between attempts to reach a server."""
T = TypeVar("T")


@dataclass(eq=False)
class ServerPool:
    """The servers of one environment: each episode is played on the one that plays the fewest."""

    connections: Sequence[EnvConnection]
    id: str = ""
    _playing: Counter[EnvConnection] = field(default_factory=Counter)
    _lost: dict[EnvConnection, float] = field(default_factory=dict)  # the time at which it is tried again
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)
    _pulse: threading.Thread | None = None

    def take(self) -> EnvConnection:
        """A server for an episode; those that were lost only if there is no other."""
        with self._lock:
            now = time.monotonic()
            chosen = min(self.connections, key=lambda one: (self._lost.get(one, 0.0) > now, self._playing[one]))
            self._playing[chosen] += 1
            if self._pulse is None or not self._pulse.is_alive():  # also in a forked process
                self._pulse = threading.Thread(target=self._keep_alive, name="served-environment", daemon=True)
                self._pulse.start()
        return chosen

    def give_back(self, server: EnvConnection, is_lost: bool = False) -> None:
        """An episode has left the server."""
        with self._lock:
            self._playing[server] -= 1
            if is_lost:
                self._lost[server] = time.monotonic() + 10 * RETRY_SECONDS

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        for connection in self.connections:
            connection.close()

    def _keep_alive(self) -> None:
        """Tell the servers that this process lives, while their sessions wait for the model."""
        while not self._closed.wait(CLIENT_SECONDS / 6):
            for server in self.connections:
                if self._playing[server]:
                    try:
                        server.post("/v1/alive", b"{}")
                    except (ConnectionError, RefusedCallError):
                        continue  # the next call says what is wrong


@dataclass(eq=False)
class ServedSession:
    """One episode on a server. Calls are numbered, so that one whose connection was lost can be sent again."""

    servers: ServerPool
    first: EnvCall
    """What is sent with each call."""
    only: EnvConnection | None = None
    """The only server that can answer; None: any of them."""
    _server: EnvConnection | None = None
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _number: int = 0

    def open(self, arguments: Mapping[str, Any]) -> ResetResult:
        """Begin the episode."""
        return self.call("/v1/open", ResetResult, seed=arguments["seed"])

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """The environment's response."""
        return self.call("/v1/respond", EnvResponse, turn=turn)

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """The score of the episode; one that was not opened has no other calls."""
        is_only_call = self._number == 0
        try:
            return self.call("/v1/score", ScoreResult, completion=arguments.get("completion", ""))
        finally:
            if is_only_call:
                self._leave()

    def close(self) -> None:
        """End the session."""
        server = self._leave()
        if server is not None:
            with suppress(ConnectionError, RefusedCallError):  # the server ends sessions of clients that it lost
                server.post("/v1/close", encode({"session": self._name}))

    def call(self, path: str, kind: type[T], **arguments: Any) -> T:
        """The value of a call; the clock of this process stands still, as that of the server counts.

        Raises:
            CallFailed: the environment failed, or its server cannot be reached.
        """
        task = current_task.get()
        timeout = None if task is None else task.timeout
        with paused():
            received = self._send(path, replace(self.first, session=self._name, timeout=timeout, **arguments))
        try:
            answer = decode(EnvAnswer, received)
            value = None if answer.failure is not None else decode(kind, answer.value)
        except ValueError as error:
            raise CallFailed(Failure("server", f"was answered in another form: {error}"[:500])) from error
        if task is not None:
            task.add_seconds(answer.seconds)
        if answer.failure is not None:
            raise CallFailed(answer.failure)
        return value  # type: ignore[return-value]

    def _send(self, path: str, call: EnvCall) -> JsonObject:
        """Send a call until it is answered, or a server was out of reach for as long as the call's deadline. An episode
        that a server refuses begins on another one."""
        call, patience, until = replace(call, number=self._number), call.timeout or CLIENT_SECONDS, 0.0
        refusals, is_free = 0, call.number == 0 and self.only is None
        self._number += 1
        while True:
            server = self.only or self._server or self.servers.take()
            self._server = None if self.only else server
            try:
                return server.post(path, encode(call))
            except RefusedCallError as error:
                refusals += 1
                if is_free and refusals < len(self.servers.connections):
                    self._leave(is_lost=True)
                    continue
                why = f"{server.url} does not have it any more" if error.status == GONE else str(error)
                raise CallFailed(Failure("server", f"was refused by its server: {why}")) from error
            except ConnectionError as error:
                until = until or time.monotonic() + patience
                if time.monotonic() > until or is_abandoned():
                    raise CallFailed(Failure("server", f"was not answered: {error}")) from error
                if is_free:
                    self._leave(is_lost=True)
                time.sleep(RETRY_SECONDS)

    def _leave(self, is_lost: bool = False) -> EnvConnection | None:
        server, self._server = self._server, None
        if server is not None:
            self.servers.give_back(server, is_lost)
        return server
