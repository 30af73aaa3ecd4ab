"""An environment that `aitrain env serve` serves, as one of this process: `--rl-env http://host:port`."""

import itertools
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

import httpx
from pydantic import TypeAdapter

from aitrain import activity
from aitrain.environment.contract import ENV_KINDS, Case, ScoreResult
from aitrain.environment.http_server import check_url
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.session import AssistantTurn, EnvResponse, Group, GroupMember, Message
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.execution.deadline_pool import CANCELLED
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import Outcome, Task, current_task, is_abandoned, paused
from aitrain.execution.user_code import describe_error

TOKEN_VARIABLE = "AITRAIN_ENV_TOKEN"
"""Environment variable of the token that clients send, on both sides."""

METHODS = (*ENV_KINDS, "build_eval_dataset", "score_group", "get_tools")
"""Methods that a client has to know of."""

JsonObject = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class EnvDescription:
    """The environment of a server."""

    protocol: Literal[8]
    id: str
    """Hash of source, configuration and rows; every call names it."""
    name: str
    """Name of its class."""
    methods: list[str]
    """Which of METHODS it has."""
    rows: list[JsonObject]
    """The dataset, in the form in which rollout records have it."""
    held_out: list[JsonObject] = field(default_factory=list)
    """The dataset of build_eval_dataset."""
    sees_thoughts: bool = False
    tools: Tools = field(default_factory=Tools)
    """The tools of get_tools, which cannot be run by their names."""
    requires: EnvRequirements = field(default_factory=EnvRequirements)
    tokenizer: str | None = None
    """Model whose tokenizer the rows were built with; None if they did not need one."""
    facts: JsonObject = field(default_factory=dict)
    """For the client's environment.json: module, class, file, sha256, config."""
    source: tuple[dict[str, str], ...] = ()
    """The environment's files, each with `name` and `text`."""


@dataclass(frozen=True)
class EnvCall:
    """One call of an episode."""

    session: str
    environment: str
    """The `id` of the description."""
    case: int = 0
    """Number of the row; those of build_eval_dataset follow the others."""
    seed: int = 0
    timeout: float = 60.0
    """Deadline in seconds."""
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


def encode(value: EnvDescription | EnvCall | Outcome[Any]) -> bytes:
    """The value as JSON.

    Raises:
        TypeError: something in it cannot be written as JSON.
    """
    return json.dumps(asdict(value)).encode()


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
"""Seconds without a byte after which a server is lost: it writes spaces while a call runs."""
RETRY_SECONDS = 0.5
"""Seconds between attempts to reach a server."""


@cache
def _http(process: int) -> httpx.Client:
    """The connections of a process; a forked one has its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.Client(trust_env=False, limits=limits, headers={"Content-Type": "application/json"})


UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors of a request that the server did not get."""


class RefusedCallError(httpx.HTTPError):
    """The server refused a request."""


def exchange(kind: type[T], url: str, path: str, call: EnvCall | None = None) -> T:
    """What a server answers to a call; without one, to a GET.

    Raises:
        httpx.HTTPError: it refused the request, or did not answer; one of UNREACHED if it did not get it.
        ValueError: its answer has another form.
        CallFailed: the calling task was abandoned meanwhile.
    """
    method, body = ("GET", None) if call is None else ("POST", encode(call))
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    headers = {"Authorization": f"Bearer {env_token()}"}
    received = bytearray()
    with _http(os.getpid()).stream(method, url + path, content=body, headers=headers, timeout=timeout) as response:
        for part in response.iter_bytes():
            received += part
            activity.own.tick()  # the server is alive, and has deadlines of its own
            if is_abandoned():
                raise CallFailed(CANCELLED)
    if "json" not in response.headers.get("Content-Type", ""):  # of a proxy that does not reach it
        raise httpx.ConnectError(f"status {response.status_code}, and not in JSON")
    if response.is_error:
        raise RefusedCallError(f"status {response.status_code}: {received.decode(errors='replace')}")
    return decode(kind, json.loads(received))


@dataclass(eq=False)
class ServedSession:
    """One episode on a server."""

    first: EnvCall
    """What is sent with each call."""
    urls: list[str]
    """The servers, in the order in which this episode tries them."""
    _url: str = ""
    """The server that has the episode; empty before it is opened."""

    def open(self, arguments: Mapping[str, Any]) -> EnvResponse:
        """Begin the episode."""
        return self.call("/v1/open", Outcome[EnvResponse], seed=arguments["seed"])

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """The environment's response."""
        return self.call("/v1/respond", Outcome[EnvResponse], turn=turn)

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """The score of the episode."""
        said = {name: arguments.get(name, "") for name in ("completion", "thought")}
        return self.call("/v1/score", Outcome[ScoreResult], **said)

    def score_group(self, group: Group) -> list[ScoreResult]:
        """The results of `score_group`."""
        return self.call("/v1/score_group", Outcome[list[ScoreResult]], members=tuple(group.members))

    def close(self) -> None:
        """End the session."""
        if self._url:
            with suppress(httpx.HTTPError):  # the server ends sessions that have no more calls
                exchange(dict, self._url, "/v1/close", self.first)

    def call(self, path: str, kind: type[Outcome[T]], **arguments: Any) -> T:
        """The value of a call; the clock of this process stands still, as that of the server counts.

        Raises:
            CallFailed: the environment failed, or its server cannot be reached.
        """
        task = current_task.get() or Task(self.first.timeout)
        try:
            with paused():
                answer = self._send(path, kind, replace(self.first, timeout=task.timeout, **arguments))
        except (httpx.HTTPError, ValueError) as error:
            what = f"was not answered by {self._url or ', '.join(self.urls)}: {describe_error(error)}"
            raise CallFailed(Failure("server", what)) from error
        task.add_seconds(answer.seconds)
        if answer.failure is not None:
            raise CallFailed(answer.failure)
        return answer.value  # type: ignore[return-value]

    def _send(self, path: str, kind: type[T], call: EnvCall) -> T:
        """Send a call, again as long as no server can be reached, at most for the seconds of its deadline. An episode
        that a server refuses is opened on another one. A request that was received is not repeated, as the call would
        run twice."""
        until, refusals = time.monotonic() + call.timeout, 0
        urls = itertools.cycle([self._url] if self._url else self.urls)
        while True:
            url = next(urls)
            try:
                answer = exchange(kind, url, path, call)
                self._url = url if path == "/v1/open" else self._url  # other first calls are the only ones
                return answer
            except RefusedCallError:
                refusals += 1
                if self._url or refusals >= len(self.urls):
                    raise
            except UNREACHED:
                if time.monotonic() > until or is_abandoned():
                    raise
                time.sleep(RETRY_SECONDS)


class ServedEnvironment:
    """The environment of one server, or of several that serve the same one and play the episodes in turn. `connect`
    makes a subclass that has the environment's name, and the methods that it has there."""

    def __init__(self, urls: list[str], description: EnvDescription) -> None:
        self.urls, self.description = urls, description
        self._episodes = itertools.count()
        self.requirements = replace(description.requires, isolation=None)  # the server's own processes
        self.sees_thoughts = description.sees_thoughts
        self.offered_tools = description.tools
        self.facts = {**description.facts, "served_by": urls}

    def build_dataset(self, tokenizer: object) -> list[JsonObject]:
        """The server's rows."""
        if (built := self.description.tokenizer) is not None:
            trained = str(getattr(tokenizer, "name_or_path", ""))
            if trained and PurePosixPath(trained).name != PurePosixPath(built).name:
                raise EnvironmentFailed(
                    f"The environment's server built the rows with the tokenizer of {built}, and this model has that of"
                    f" {trained}\nStart the server with: aitrain env serve ... --tokenizer {trained}"
                )
        return self.description.rows

    def session(self, case: Case | None) -> ServedSession:
        """The session of a new episode."""
        assert case is not None
        own = next(self._episodes) % len(self.urls)
        call = EnvCall(uuid.uuid4().hex, self.description.id, case.own_number)
        return ServedSession(call, self.urls[own:] + self.urls[:own])

    def served_source(self) -> list[dict[str, str]]:
        """The environment's files, each with `name` and `text`; only names inside of a folder."""
        given = self.description.source
        return [file for file in given if not file["name"].startswith("/") and ".." not in file["name"]]


# -- connecting


def connect(urls: str, /) -> ServedEnvironment:
    """The environment that all of these URLs serve; its server constructs it, with the keywords that are given there.

    Raises:
        ConfigError: a URL is wrong or holds credentials, or there is no token.
        EnvironmentFailed: a server does not answer, or serves another environment than the first.
    """
    advice = f"Put the token into the environment variable {TOKEN_VARIABLE}."
    addresses = [check_url(url.strip(), advice) for url in urls.split(",")]
    descriptions = list(map(_described, addresses))
    first = descriptions[0]
    for url, other in zip(addresses, descriptions, strict=True):
        if other.id != first.id:
            raise EnvironmentFailed(
                f"The servers at {addresses[0]} and {url} serve different environments:\n"
                "Start both with the same files, configuration and seed."
            )
    methods: dict[str, Any] = {name: _played_elsewhere for name in METHODS if name in first.methods}
    if "build_eval_dataset" in methods:
        methods["build_eval_dataset"] = lambda self: self.description.held_out
    # a class with the name of the environment's, which no file here is the source of
    kind: type[ServedEnvironment] = type(first.name, (ServedEnvironment,), {"__module__": "aitrain.served", **methods})
    return kind(addresses, first)


def _described(url: str) -> EnvDescription:
    try:
        return exchange(EnvDescription, url, "/v1/environment")
    except (httpx.HTTPError, ValueError) as error:
        raise EnvironmentFailed(
            f"The environment at {url} cannot be used: {describe_error(error)}\n"
            f"Start it with this version of aitrain and the same {TOKEN_VARIABLE}: aitrain env serve ENV --port PORT"
        ) from error


def _played_elsewhere(self: ServedEnvironment, **_: object) -> None:
    raise NotImplementedError("a session of the environment's server takes the calls")
