"""An environment that `aitrain env serve` serves, as one of this process: `--rl-env http://host:port`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from aitrain.environment.contract import ENV_KINDS, Case
from aitrain.environment.env_connection import UNAUTHORIZED, EnvConnection, RefusedCallError, checked_urls
from aitrain.environment.episode_group import Group
from aitrain.environment.score_parsing import Bounds, ScoreResult
from aitrain.environment.served_session import ServedSession, ServerPool
from aitrain.environment.tools import Tools
from aitrain.environment.wire_format import (
    PROTOCOL,
    TOKEN_VARIABLE,
    EnvCall,
    EnvDescription,
    JsonObject,
    decode,
    encode,
    finite,
)
from aitrain.errors import ConfigError, EnvironmentFailed

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
