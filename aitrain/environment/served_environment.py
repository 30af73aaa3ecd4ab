"""An environment that `aitrain env serve` serves, as one of this process: `--rl-env http://host:port`."""

from __future__ import annotations

import http.client
import inspect
import json
import os
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from traceback import StackSummary
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from aitrain import activity
from aitrain.environment.contract import ENV_KINDS, Case
from aitrain.environment.score_parsing import Bounds, ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, Group, ResetResult
from aitrain.environment.tools import Tools
from aitrain.environment.wire_format import (
    CLIENT_HEADER,
    CLIENT_SECONDS,
    PROTOCOL,
    TOKEN_VARIABLE,
    EnvAnswer,
    EnvCall,
    EnvDescription,
    JsonObject,
    decode,
    encode,
    env_token,
    finite,
)
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import current_task, is_abandoned, on_cancel, paused

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 15.0
"""Seconds without a byte after which a server is lost: it sends a space every two seconds while a call runs."""
BEHIND_PROXY = (502, 503, 504)
"""Statuses with which a proxy says that it does not reach the server."""
UNAUTHORIZED, GONE = 401, 410
"""Statuses for a wrong token, and for a session that the server does not have."""


class RefusedCallError(AitrainError):
    """A server of an environment refused a request; `status` is the one of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def checked_urls(given: str) -> list[str]:
    """The URLs of a list with commas.

    Raises:
        ConfigError: one is not a URL, or holds credentials; or the token cannot be sent.
    """
    env_token()
    urls = [url.strip().rstrip("/") for url in given.split(",")]
    for url in urls:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and _port(parts) is not None and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not is_address:
            raise ConfigError(f"rl_env: {url or given} is not a URL\nGive one such as http://10.0.0.5:8000.")
        if "@" in parts.netloc:
            raise ConfigError(
                f"rl_env: the URL of {parts.hostname} holds credentials\n"
                f"Put the server's token into the environment variable {TOKEN_VARIABLE}."
            )
    return urls


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None


@dataclass
class _Cancellation:
    """Closes the connection that a call waits for, when the call is cancelled."""

    connection: http.client.HTTPConnection | None = None
    failure: Failure | None = None

    def cancel(self, failure: Failure) -> None:
        self.failure = failure
        if self.connection is not None and self.connection.sock is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class EnvConnection:
    """The connections of this process to one server."""

    url: str
    client: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this process, which the sessions belong to."""
    _idle: list[http.client.HTTPConnection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pid: int = field(default_factory=os.getpid)

    def get(self, path: str) -> JsonObject:
        """The JSON object of a path.

        Raises:
            ConnectionError: the server cannot be reached, or does not answer.
            RefusedCallError: it refuses the request.
        """
        return self._request("GET", path, None)

    def post(self, path: str, body: bytes) -> JsonObject:
        """The JSON object that a call returns.

        Raises:
            ConnectionError: the server cannot be reached, or was lost during the call.
            RefusedCallError: it refuses the call.
        """
        return self._request("POST", path, body)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> JsonObject:
        cancellation = _Cancellation()
        with on_cancel(cancellation.cancel, StackSummary):
            while True:
                connection, is_kept = self._connection()
                cancellation.connection = connection
                try:
                    return self._exchange(connection, method, path, body)
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    # the server may have closed a kept connection; calls have numbers, so that none is made twice
                    if is_kept and cancellation.failure is None and not isinstance(error, TimeoutError):
                        continue
                    what = f"did not answer for {SILENCE_SECONDS:g} s" if isinstance(error, TimeoutError) else error
                    raise ConnectionError(f"the environment's server at {self.url}: {what}") from error
                except BaseException:
                    connection.close()
                    raise

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> JsonObject:
        headers = {"Content-Type": "application/json", CLIENT_HEADER: self.client}
        if token := env_token(self.url):
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, urlsplit(self.url).path + path, body, headers)
        response, parts = connection.getresponse(), list[bytes]()
        while part := response.read1(1 << 16):
            parts.append(part)
            activity.own.tick()  # the server is alive, and has deadlines of its own
        response.close()  # else the connection takes no further request
        try:
            found = json.loads(b"".join(parts))
        except ValueError:
            found = None
        if not isinstance(found, dict) and response.status in BEHIND_PROXY:
            raise ConnectionError(f"a proxy answers with status {response.status}")
        with self._lock:
            self._idle.append(connection)
        if not isinstance(found, dict):
            raise RefusedCallError(f"{self.url}{path} does not answer in JSON: is it `aitrain env serve`?", 0)
        if response.status != http.client.OK or "error" in found:
            # a call that is refused while the server sends spaces has the status in its object only
            raise RefusedCallError(
                f"{self.url}{path}: {str(found.get('error'))[:500]}", found.get("status", response.status)
            )
        return found

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._pid != os.getpid():  # a forked process must not write to its parent's connections
                self._pid, self._idle, self.client = os.getpid(), [], uuid.uuid4().hex
            if self._idle:
                return self._idle.pop(), True
        return self._connect(), False

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", _port(parts)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_SECONDS, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ConnectionError(f"the environment's server at {self.url} cannot be reached: {error}") from error
        connection.sock.settimeout(SILENCE_SECONDS)
        return connection


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


CONCURRENT_CALLS = 256
"""Calls at the same time, unless --rl-env-workers says how many: they only wait."""


class ServedEnvironment:
    """The environment of one server, or of several that serve the same one. `connect` makes a subclass that has its
    name, and the methods that it has there."""

    def __init__(self, servers: ServerPool, description: EnvDescription) -> None:
        self.servers, self.description = servers, description
        self.requirements = replace(description.requires, isolation=None)  # the server's own processes
        self.offered_tools = None if description.tools is None else Tools.offered(description.tools)
        self.facts: JsonObject = {
            **description.facts,
            "class": description.name,
            "served_by": [connection.url for connection in servers.connections],
        }

    def build_dataset(self, tokenizer: object) -> list[JsonObject]:
        """The rows, in the form in which rollout records have them."""
        built = self.description.tokenizer
        trained = "" if built is None else str(getattr(tokenizer, "name_or_path", ""))
        if built is not None and trained and PurePosixPath(trained).name != PurePosixPath(built).name:
            raise EnvironmentFailed(
                f"The environment's server built the rows with the tokenizer of {built}, and this model has that of"
                f" {trained}\nStart the server with: aitrain env serve ... --tokenizer {trained}"
            )
        return self._rows("train")

    def held_out_rows(self) -> list[JsonObject]:
        """The rows of build_eval_dataset."""
        return self._rows("held_out")

    def is_serial(self) -> bool:
        """Whether a server says now that calls, or episodes, are to be made one after another."""
        try:
            return any(server.get("/v1/environment")["is_serial"] for server in self.servers.connections)
        except (ConnectionError, RefusedCallError):
            return self.description.is_serial

    def session(self, case: Case | None, bounds: Bounds) -> ServedSession:
        """The session of a new episode."""
        if case is None:
            raise ValueError("a session of a served environment needs its case")
        return ServedSession(self.servers, EnvCall("", 0, self.servers.id, case.own_number, bounds=_json(bounds)))

    def score(self, group: Group, bounds: Bounds) -> list[ScoreResult]:
        """The results of `score_group`, always on the first server, as they may depend on earlier groups."""
        number, members = group.case.own_number, tuple(group.members)
        first = EnvCall("", 0, self.servers.id, number, members=members, bounds=_json(bounds))
        return ServedSession(self.servers, first, self.servers.connections[0]).call(
            "/v1/score_group", list[ScoreResult]
        )

    def reference_of(self, case_idx: object, case: JsonObject) -> Any:
        """What the environment's `reference` returns, if it has one."""
        try:
            asked = encode({"case_idx": case_idx, "case": case})
            return self.servers.connections[0].post("/v1/reference", asked)["value"]
        except (ConnectionError, RefusedCallError) as error:
            raise EnvironmentFailed(f"The environment's server did not answer for reference: {error}") from error

    def served_source(self) -> list[tuple[str, str]]:
        """Names and texts of the environment's files; only names inside of a folder."""
        try:
            files = self.servers.connections[0].get("/v1/source")["files"]
        except (ConnectionError, RefusedCallError):
            return []
        paths = [(PurePosixPath(str(file["name"])), str(file["text"])) for file in files]
        return [(str(path), text) for path, text in paths if not path.is_absolute() and ".." not in path.parts]

    def close(self) -> None:
        """Close the connections; the servers keep their environment."""
        self.servers.close()

    def _rows(self, dataset: str) -> list[JsonObject]:
        rows, start = list[JsonObject](), 0
        while start is not None:
            try:
                page = self.servers.connections[0].get(f"/v1/rows?dataset={dataset}&start={start}")
            except (ConnectionError, RefusedCallError) as error:
                raise EnvironmentFailed(f"The environment's rows cannot be read: {error}") from error
            if page["environment"] != self.servers.id:
                raise EnvironmentFailed("The environment's server was restarted with another environment")
            rows += page["rows"]
            start = page["next"]
        return rows


def _json(bounds: Bounds) -> tuple[float | None, float | None]:
    return finite(bounds[0]), finite(bounds[1])


# -- connecting


def connect(urls: str, /, **keywords: object) -> ServedEnvironment:
    """The environment that all of these URLs serve.

    Raises:
        ConfigError: a URL is wrong, or keywords for its constructor are given.
        EnvironmentFailed: a server does not answer, or serves another environment than the first.
    """
    check_id(urls, keywords)
    connections = [EnvConnection(url) for url in checked_urls(urls)]
    descriptions = [_described(connection) for connection in connections]
    first = descriptions[0]
    for connection, other in zip(connections, descriptions, strict=True):
        if other.id != first.id:
            raise EnvironmentFailed(
                f"The servers at {connections[0].url} and {connection.url} serve different environments:\n"
                f"{_named(first)}\n{_named(other)}\nStart both with the same files, configuration and seed."
            )
    return _class_of(first)(ServerPool(connections, first.id), first)


def check_id(urls: str, keywords: Mapping[str, object]) -> None:
    """Check the URLs without the servers.

    Raises:
        ConfigError: a URL is wrong, or keywords for the constructor are given.
    """
    checked_urls(urls)
    if keywords:
        raise ConfigError(
            "rl_env_config: the environment is constructed by its server, which takes these keywords\n"
            "Start it with: aitrain env serve ENV --rl-env-config ..."
        )


def _described(connection: EnvConnection) -> EnvDescription:
    try:
        given = connection.get("/v1/environment")
        if given.get("protocol") != PROTOCOL:
            raise EnvironmentFailed(
                f"The server at {connection.url} speaks version {given.get('protocol')} of the protocol, and this"
                f" aitrain {PROTOCOL}\nInstall the same version of aitrain on both machines."
            )
        description = decode(EnvDescription, given)
    except ConnectionError as error:
        raise EnvironmentFailed(
            f"{str(error)[0].upper()}{str(error)[1:]}\nStart it first: aitrain env serve ENV --port PORT"
        ) from error
    except RefusedCallError as error:
        advice = f"\nSet {TOKEN_VARIABLE} to the server's token." if error.status == UNAUTHORIZED else ""
        raise EnvironmentFailed(f"The environment's server refused {error}{advice}") from error
    except ValueError as error:
        raise EnvironmentFailed(f"The server at {connection.url} is not one of aitrain env serve: {error}") from error
    is_named = description.name.isprintable() and all(map(str.isidentifier, description.parameters or ()))
    if description.kind not in ENV_KINDS or not is_named:
        raise EnvironmentFailed(f"The server at {connection.url} describes no environment: kind {description.kind}")
    return description


def _named(description: EnvDescription) -> str:
    return f"{description.name}, {description.train} rows, source {str(description.facts.get('sha256'))[:12]}"


def _class_of(description: EnvDescription) -> type[ServedEnvironment]:
    """A class with the name of the environment's, and those methods by which others tell what it can do."""
    members: dict[str, Any] = {
        "__module__": "aitrain.served",  # no file here is its source
        description.kind: _played_elsewhere(description.parameters),
    }
    if description.held_out is not None:
        members["build_eval_dataset"] = ServedEnvironment.held_out_rows
    if description.scores_groups:
        members["score_group"] = _played_elsewhere(None)
    if description.has_reference:
        members["reference"] = ServedEnvironment.reference_of
    if description.tools is not None:
        members["get_tools"] = lambda self: []  # see offered_tools
    return type(description.name, (ServedEnvironment,), members)


def _played_elsewhere(parameters: Sequence[str] | None) -> Any:
    """A method with these parameters, which is not called here."""

    def method(self: ServedEnvironment, **_: object) -> None:
        raise NotImplementedError("a session of the environment's server takes the calls")

    if parameters is not None:
        names = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        names += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters]
        method.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return method
