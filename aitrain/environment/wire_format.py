"""What a served environment and its clients send each other as JSON; docs/remote-environments.md describes it."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.score_parsing import Bounds
from aitrain.environment.session import AssistantTurn, GroupMember, Message
from aitrain.environment.tools import ToolOffer
from aitrain.errors import ConfigError
from aitrain.execution.failure import Failure

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PROTOCOL = 2
TOKEN_VARIABLE = "AITRAIN_ENV_TOKEN"
"""Environment variable of the token that clients send, on both sides."""
LOCAL = ("127.0.0.1", "localhost", "::1")
CLIENT_HEADER = "X-Aitrain-Client"
"""Header with the name of the client, whose sessions are ended when the server has not heard of it for a while."""
CLIENT_SECONDS = 60.0
"""Seconds after which the sessions of a silent client are ended."""

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
    kind: str
    """The method that plays an episode."""
    train: int
    """Number of rows."""
    parameters: tuple[str, ...] | None = None
    """Parameters of that method; None if it takes all."""
    held_out: int | None = None
    """Number of rows of build_eval_dataset; None without that method."""
    scores_groups: bool = False
    has_reference: bool = False
    tools: ToolOffer | None = None
    """The tools of get_tools; None without that method."""
    requires: EnvRequirements = field(default_factory=EnvRequirements)
    is_serial: bool = False
    """Whether scores depend on the order of the calls, so that clients make one at a time."""
    tokenizer: str | None = None
    """Model whose tokenizer the rows were built with; None if they did not need one."""
    facts: JsonObject = field(default_factory=dict)
    """For the client's environment.json: module, class, file, sha256, config."""


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
    bounds: tuple[float | None, float | None] = (0.0, 1.0)
    """Lowest and highest score; None: no limit."""
    turn: AssistantTurn | None = None
    """The answer of the model, of `respond`."""
    completion: str | list[Message] = ""
    """What the model said in the episode, of `score`."""
    members: tuple[GroupMember, ...] = ()
    """The episodes of `score_group`."""

    @property
    def score_bounds(self) -> Bounds:
        """The lowest and the highest score as numbers."""
        low, high = self.bounds
        return (-math.inf if low is None else low, math.inf if high is None else high)


@dataclass(frozen=True)
class EnvAnswer:
    """What came of a call so far: a value or a failure, and the seconds that it ran."""

    value: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    is_running: bool = False
    """Whether it still waits or runs: the client sends it again."""


def token_file(port: int) -> Path:
    """The file with the token that a server of this user and this machine has made."""
    return Path.home() / ".cache" / "aitrain" / f"env-token-{socket.gethostname()}-{port}"


def env_token(url: str = "") -> str:
    """The token of AITRAIN_ENV_TOKEN, else of the file of the server at an address of this machine; empty without one.

    Raises:
        ConfigError: it cannot be sent in a header.
    """
    token, server = os.environ.get(TOKEN_VARIABLE, ""), urlsplit(url)
    if not token and server.hostname in LOCAL:
        with suppress(OSError):
            return token_file(server.port or 80).read_text(encoding="ascii")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{TOKEN_VARIABLE}: a token has only ASCII letters, digits and signs, without spaces")
    return token


def finite(bound: float) -> float | None:
    """A bound of scores as JSON has it."""
    return bound if math.isfinite(bound) else None


def encode(value: JsonObject | EnvCall | EnvAnswer) -> bytes:
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
    from pydantic import TypeAdapter  # here, because most commands have no served environment

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    found: T = _ADAPTERS[kind].validate_python(value)
    return found


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def to_wire(value: object) -> Any:
    """A value of a row in JSON types, as rollout records have it: nan and inf become null, scalars numbers, other
    objects their text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): to_wire(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_wire(item) for item in value]
    item = getattr(value, "item", None)  # numpy and torch scalars have it
    return to_wire(item()) if callable(item) and getattr(value, "ndim", 1) == 0 else str(value)
