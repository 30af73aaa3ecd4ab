"""An environment that `aitrain env serve` serves, as one of this process: `--rl-env http://host:port`."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter

from aitrain import activity
from aitrain.environment.contract import Case, EnvKind, ScoreResult
from aitrain.environment.http_server import check_url
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.session import AssistantTurn, EnvResponse, Group, GroupMember, Message, ResetResult
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, EnvironmentFailed, ServerRefusedError
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import Outcome, current_task, is_abandoned, paused

PROTOCOL = 5
TOKEN_VARIABLE = "AITRAIN_ENV_TOKEN"
"""Environment variable of the token that clients send, on both sides."""

JsonObject = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class EnvDescription:
    """The environment of a server."""

    protocol: int
    id: str
    """Hash of source, configuration and rows; every call names it."""
    name: str
    """Name of its class."""
    kind: EnvKind
    """The method that plays an episode."""
    train: int
    """Number of rows."""
    held_out: int | None = None
    """Number of rows of build_eval_dataset; None without that method."""
    scores_groups: bool = False
    sees_thoughts: bool = False
    tools: Tools | None = None
    """The tools of get_tools, which cannot be run by their names; None without that method."""
    requires: EnvRequirements = field(default_factory=EnvRequirements)
    tokenizer: str | None = None
    """Model whose tokenizer the rows were built with; None if they did not need one."""
    facts: JsonObject = field(default_factory=dict)
    """For the client's environment.json: module, class, file, sha256, config."""
    source: tuple[dict[str, str], ...] = ()
    """The environment's files, each with `name` and `text`."""


@dataclass(frozen=True)
class EnvCall:
    """One call of an episode. `number` counts the calls of its session: a call that is sent again after a lost
    connection gets the result of the first time."""

    session: str
    number: int
    environment: str
    """The `id` of the description."""
    case: int = 0
    """Number of the row; those of build_eval_dataset follow the others."""
    seed: int = 0
    timeout: float | None = None
    """Deadline in seconds; None: the server's."""
    turn: AssistantTurn | None = None
    """The answer of the model, of `respond`."""
    completion: str | list[Message] = ""
    """What the model said in the episode, of `score`."""
    thought: str = ""
    """What it thought before its last answer."""
    members: tuple[GroupMember, ...] = ()
    """The episodes of `score_group`."""


def env_token() -> str:
    """The token of AITRAIN_ENV_TOKEN.

    Raises:
        ConfigError: there is none, or it cannot be sent in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"Set the variable {TOKEN_VARIABLE} to a random text without spaces, the same one for the environment's"
            " server and for what trains on it: whoever reaches the server could run the environment's tools."
        )
    return token


def encode(value: JsonObject | EnvCall | Outcome[Any]) -> bytes:
    """The value as JSON.

    Raises:
        TypeError: something in it cannot be written as JSON.
    """
    plain = value if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(kind: type[T], value: object) -> T:
    """The object that a JSON value describes.

    Raises:
        ValueError: the value has another form.
    """
    found: T = _adapter(kind).validate_python(value)
    return found


_adapter: Any = cache(TypeAdapter)


CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 15.0
"""Seconds without an answer after which a server is lost: it answers a call that runs for longer as running."""
RETRY_SECONDS = 0.5
"""Seconds between attempts to reach a server."""
PATIENCE = 60.0
"""Seconds of attempts for a call without a deadline."""
UNAUTHORIZED, GONE = 401, 410
"""Statuses for a wrong token, and for a session that the server does not have."""


def checked_urls(given: str) -> list[str]:
    """The URLs of a list with commas.

    Raises:
        ConfigError: one is not a URL, or holds credentials; or there is no token.
    """
    env_token()
    try:
        return [check_url(url.strip(), TOKEN_VARIABLE) for url in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"rl_env: {error}") from None


@cache
def _http(process: int) -> httpx.Client:
    """The connections of a process; a forked one has its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.Client(trust_env=False, limits=limits, headers={"Content-Type": "application/json"})


@dataclass(eq=False)
class EnvConnection:
    """One server, and what is known of it."""

    url: str
    playing: int = 0
    """Episodes of this process that are played there."""
    lost_until: float = 0.0
    """The time until which other servers are preferred."""

    def request(
        self, method: str, path: str, body: bytes | None = None, seconds: float | None = SILENCE_SECONDS
    ) -> JsonObject:
        """The JSON object that the server answers.

        Raises:
            ConnectionError: the server cannot be reached, or does not answer.
            ServerRefusedError: it refuses the request.
        """
        timeout, headers = httpx.Timeout(seconds, connect=CONNECT_SECONDS), {"Authorization": f"Bearer {env_token()}"}
        try:
            response = _http(os.getpid()).request(
                method, self.url + path, content=body, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            what = f"{type(error).__name__} {error}".strip()
            raise ConnectionError(f"the environment's server at {self.url} cannot be reached: {what}") from error
        activity.own.tick()  # the server is alive, and has deadlines of its own
        if "json" not in response.headers.get("Content-Type", ""):  # of a proxy that does not reach it
            raise ConnectionError(f"{self.url} answers with status {response.status_code}, and not in JSON")
        if response.is_error:
            raise ServerRefusedError(
                f"{self.url}{path}: {response.status_code}: {response.text[:500]}", response.status_code
            )
        found: JsonObject = response.json()
        return found


@dataclass(eq=False)
class ServedSession:
    """One episode on a server. Calls are numbered, so that one whose connection was lost can be sent again."""

    environment: ServedEnvironment
    first: EnvCall
    """What is sent with each call."""
    _server: EnvConnection | None = None
    _number: int = 0

    def open(self, arguments: Mapping[str, Any]) -> ResetResult:
        """Begin the episode."""
        return self.call("/v1/open", ResetResult, seed=arguments["seed"])

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """The environment's response."""
        return self.call("/v1/respond", EnvResponse, turn=turn)

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """The score of the episode; one that was not opened has no other calls."""
        said = {name: arguments.get(name, "") for name in ("completion", "thought")}
        return self.call("/v1/score", ScoreResult, **said)

    def score_group(self, group: Group) -> list[ScoreResult]:
        """The results of `score_group`."""
        return self.call("/v1/score_group", list[ScoreResult], members=tuple(group.members))

    def close(self) -> None:
        """End the session."""
        if (server := self.leave()) is not None:
            with suppress(ConnectionError, ServerRefusedError):  # the server ends sessions that have no more calls
                server.request("POST", "/v1/close", encode({"session": self.first.session}))

    def call(self, path: str, kind: type[T], **arguments: Any) -> T:
        """The value of a call; the clock of this process stands still, as that of the server counts.

        Raises:
            CallFailed: the environment failed, or its server cannot be reached.
        """
        task = current_task.get()
        timeout = None if task is None else task.timeout
        call = replace(self.first, number=self._number, timeout=timeout, **arguments)
        self._number += 1
        try:
            with paused():
                received = self._send(path, call)
        finally:
            if call.number == 0 and path != "/v1/open":  # the only call of its session
                self.leave()
        try:
            answer = decode(Outcome[Any], received)
            value = None if answer.failure is not None else decode(kind, answer.value)
        except ValueError as error:
            raise CallFailed(Failure("server", f"was answered in another form: {error}"[:500])) from error
        if task is not None:
            task.add_seconds(answer.seconds)
        if answer.failure is not None:
            raise CallFailed(answer.failure)
        return value  # type: ignore[return-value]

    def _send(self, path: str, call: EnvCall) -> JsonObject:
        """Send a call until it has ended, or a server was out of reach for as long as the call's deadline. An episode
        that a server refuses begins on another one."""
        patience, lost_at, refusals = call.timeout or PATIENCE, 0.0, 0
        is_free = call.number == 0
        while True:
            server = self._server = self._server or self.environment.take_server()
            try:
                received = server.request("POST", path, encode(call))
                if not received.get("is_running"):
                    return received
                lost_at = 0.0
                if is_abandoned():
                    raise CallFailed(Failure("raised", "cancelled: the result is no longer needed"))
            except ServerRefusedError as error:
                refusals += 1
                if not is_free or refusals >= len(self.environment.connections):
                    why = f"{server.url} does not have it any more" if error.status == GONE else str(error)
                    raise CallFailed(Failure("server", f"was refused by its server: {why}")) from error
                self.leave(is_lost=True)
            except ConnectionError as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + patience or is_abandoned():
                    raise CallFailed(Failure("server", f"was not answered: {error}")) from error
                if is_free:
                    self.leave(is_lost=True)
                time.sleep(RETRY_SECONDS)

    def leave(self, is_lost: bool = False) -> EnvConnection | None:
        """Have no server; returns the one that it had."""
        server, self._server = self._server, None
        if server is not None:
            with self.environment.lock:
                server.playing -= 1
                if is_lost:
                    server.lost_until = time.monotonic() + 10 * RETRY_SECONDS
        return server


class ServedEnvironment:
    """The environment of one server, or of several that serve the same one: each episode is played on the one that
    plays the fewest. `connect` makes a subclass that has the environment's name, and the methods that it has there."""

    def __init__(self, connections: Sequence[EnvConnection], description: EnvDescription) -> None:
        self.connections, self.description = connections, description
        self.requirements = replace(description.requires, isolation=None)  # the server's own processes
        self.sees_thoughts = description.sees_thoughts
        self.offered_tools = description.tools
        self.facts: JsonObject = {
            **description.facts,
            "class": description.name,
            "served_by": [connection.url for connection in connections],
        }
        self.lock = threading.Lock()

    def take_server(self) -> EnvConnection:
        """A server for an episode; those that were lost only if there is no other."""
        with self.lock:
            now = time.monotonic()
            chosen = min(self.connections, key=lambda one: (one.lost_until > now, one.playing))
            chosen.playing += 1
        return chosen

    def build_dataset(self, tokenizer: object) -> list[JsonObject]:
        """The rows, in the form in which rollout records have them."""
        built = self.description.tokenizer
        trained = "" if built is None else str(getattr(tokenizer, "name_or_path", ""))
        if built is not None and trained and PurePosixPath(trained).name != PurePosixPath(built).name:
            raise EnvironmentFailed(
                f"The environment's server built the rows with the tokenizer of {built}, and this model has that of"
                f" {trained}\nStart the server with: aitrain env serve ... --tokenizer {trained}"
            )
        return self.rows("train")

    def session(self, case: Case | None) -> ServedSession:
        """The session of a new episode."""
        assert case is not None
        return ServedSession(self, EnvCall(uuid.uuid4().hex, 0, self.description.id, case.own_number))

    def served_source(self) -> list[tuple[str, str]]:
        """Names and texts of the environment's files; only names inside of a folder."""
        paths = [(PurePosixPath(file["name"]), file["text"]) for file in self.description.source]
        return [(str(path), text) for path, text in paths if not path.is_absolute() and ".." not in path.parts]

    def close(self) -> None:
        """No-op: the servers keep their environment."""

    def rows(self, dataset: str) -> list[JsonObject]:
        """The rows of the dataset `train` or `held_out`.

        Raises:
            EnvironmentFailed: the server does not answer, or serves another environment by now.
        """
        try:
            found = self.connections[0].request("GET", f"/v1/rows?dataset={dataset}", seconds=None)
        except (ConnectionError, ServerRefusedError) as error:
            raise EnvironmentFailed(f"The environment's server did not answer for its rows: {error}") from error
        if found["environment"] != self.description.id:
            raise EnvironmentFailed("The environment's server was restarted with another environment")
        return list(found["rows"])


# -- connecting


def connect(urls: str, /) -> ServedEnvironment:
    """The environment that all of these URLs serve; its server constructs it, with the keywords that are given there.

    Raises:
        ConfigError: a URL is wrong.
        EnvironmentFailed: a server does not answer, or serves another environment than the first.
    """
    connections = [EnvConnection(url) for url in checked_urls(urls)]
    descriptions = [_described(connection) for connection in connections]
    first = descriptions[0]
    for connection, other in zip(connections, descriptions, strict=True):
        if other.id != first.id:
            raise EnvironmentFailed(
                f"The servers at {connections[0].url} and {connection.url} serve different environments:\n"
                "Start both with the same files, configuration and seed."
            )
    methods: dict[str, Any] = {first.kind: _played_elsewhere}
    if first.held_out is not None:
        methods["build_eval_dataset"] = lambda self: self.rows("held_out")
    if first.scores_groups:
        methods["score_group"] = _played_elsewhere
    if first.tools is not None:
        methods["get_tools"] = lambda self: []  # see offered_tools
    # a class with the name of the environment's, which no file here is the source of
    kind: type[ServedEnvironment] = type(first.name, (ServedEnvironment,), {"__module__": "aitrain.served", **methods})
    return kind(connections, first)


def _described(connection: EnvConnection) -> EnvDescription:
    try:
        given = connection.request("GET", "/v1/environment")
        if given.get("protocol") != PROTOCOL:
            raise EnvironmentFailed(
                f"The server at {connection.url} speaks version {given.get('protocol')} of the protocol, and this"
                f" aitrain {PROTOCOL}\nInstall the same version of aitrain on both machines."
            )
        return decode(EnvDescription, given)
    except ConnectionError as error:
        raise EnvironmentFailed(
            f"{str(error)[0].upper()}{str(error)[1:]}\nStart it first: aitrain env serve ENV --port PORT"
        ) from error
    except ServerRefusedError as error:
        advice = f"\nSet {TOKEN_VARIABLE} to the server's token." if error.status == UNAUTHORIZED else ""
        raise EnvironmentFailed(f"The environment's server refused {error}{advice}") from error
    except ValueError as error:
        raise EnvironmentFailed(f"The server at {connection.url} is not one of aitrain env serve: {error}") from error


def _played_elsewhere(self: ServedEnvironment, **_: object) -> None:
    raise NotImplementedError("a session of the environment's server takes the calls")
