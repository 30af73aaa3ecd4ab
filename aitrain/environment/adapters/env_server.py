"""HTTP calls of the adapters whose environment runs in a server of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from aitrain.environment.contract import Score, ToolResult
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import ConfigError, EnvironmentFailed


@dataclass
class StepRewards:
    """The rewards of one episode. Its score is their sum or the last of them; without any it is `unrewarded`, as the
    policy did nothing that is rewarded."""

    use: str = "sum"
    unrewarded: float | None = 0.0
    values: list[float] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)
    """Numbers that came with rewards, such as their components; the last of each name."""

    def add(self, reward: float | None, details: object = None) -> None:
        """Add the reward of a step; None is no reward."""
        if reward is not None:
            self.values.append(float(reward))
        if isinstance(details, Mapping):
            self.details |= {str(name): float(value) for name, value in details.items() if is_number(value)}

    @property
    def score(self) -> Score:
        """The score, with the sum and the number of rewards as metrics."""
        metrics = {**self.details, "return": sum(self.values), "rewards": float(len(self.values))}
        if not self.values:
            return Score(self.unrewarded, metrics)
        return Score(self.values[-1] if self.use == "last" else sum(self.values), metrics)


def check_use(use: str) -> str:
    """The setting `rewards` of an adapter.

    Raises:
        ConfigError: it is neither sum nor last.
    """
    if use not in ("sum", "last"):
        raise ConfigError(f"rl_env_config: rewards must be sum or last, not {use}")
    return use


def is_number(value: object) -> bool:
    """Whether a JSON value is a number or a truth value."""
    return isinstance(value, (bool, int, float))


ChatMessages = list[dict[str, object]]
StepResponse = ChatMessages | ToolResult | str | None
"""What a `step` returns."""


async def run_calls(
    calls: Sequence[ToolCall], run: Callable[[ToolCall], Awaitable[tuple[str, bool]]]
) -> ChatMessages | ToolResult | None:
    """The results of the calls as messages; None if there are no calls, which ends the episode.

    `run` returns a call's result, and whether it ends the episode; calls that cannot be read get their problem instead.
    """
    results: ChatMessages = []
    for call in calls:
        text, is_last = (f"error: {call.problem}", False) if call.problem else await run(call)
        results.append({"role": "tool", "name": call.name, "content": text})
        if is_last:
            return ToolResult(results, done=True)
    return results or None


def tool_schema(name: str, description: str | None, parameters: object) -> ToolJson:
    """The schema of a tool, as `get_tools` returns it."""
    return {"name": name, "description": description or "", "parameters": parameters or {}}


CONNECT_SECONDS = 10.0
DEADLINE_SECONDS = 600.0  # calls of episodes have the shorter one of --rl-env-timeout

START_SECONDS = 120.0  # for the calls that build the dataset
RETRY_SECONDS = 0.5
"""Between requests to a server that says that it is still starting."""


class EnvServer:
    """The HTTP side of one episode, with its own cookies and headers. A server that cannot be reached raises
    ConnectionError, which is counted as a failure of the kind `server`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(DEADLINE_SECONDS, connect=CONNECT_SECONDS),
            # a kept connection may have been closed by the server while the policy generated
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not is_local(url),
            verify=_certificates() if url.startswith("https:") else False,
        )
        self.headers = self._http.headers
        """Headers of all further requests."""

    async def __aenter__(self) -> EnvServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str) -> Any:
        """The JSON value of the response."""
        return _json(await self.request("GET", path))

    async def post(self, path: str, body: object = None) -> Any:
        """The JSON value of the response."""
        return _json(await self.request("POST", path, body))

    async def request(self, method: str, path: str, body: object = None, may_fail: bool = False) -> httpx.Response:
        """The response; with `may_fail`, also one with a 4xx status.

        Raises:
            ConnectionError: the server cannot be reached, or a gateway before it cannot.
            RuntimeError: the server answered with an error.
        """
        with _unreachable(self.url, path):
            response = await self._http.request(method, path, json=body)
            while response.status_code == 503 and "Retry-After" in response.headers:  # still starting
                await asyncio.sleep(RETRY_SECONDS)
                response = await self._http.request(method, path, json=body)
        if response.status_code >= (500 if may_fail else 400):
            raise _error_of(response, path)
        return response

    async def events(self, path: str, body: object = None) -> AsyncIterator[tuple[str, str]]:
        """The server-sent events of the response: their names and data."""
        with _unreachable(self.url, path):
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _error_of(response, path)
                name, lines = "", list[str]()
                async for line in response.aiter_lines():
                    field, _, value = line.partition(":")
                    value = value.removeprefix(" ")  # one space only: the data may begin with others
                    if field == "event":
                        name = value
                    elif field == "data":
                        lines.append(value)
                    elif not line and name:
                        yield name, "\n".join(lines)
                        name, lines = "", []

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def server_url(given: str, adapter: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigError: it is not a URL.
    """
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"rl_env: {adapter}:{given} does not name a server: give its URL, such as {adapter}:http://127.0.0.1:8000"
        )
    return given.rstrip("/")


def is_local(url: str) -> bool:
    """Whether a URL leads to this machine, so that no proxy is asked."""
    return (urlsplit(url).hostname or "") in ("127.0.0.1", "::1", "localhost")


@asynccontextmanager
async def starting(what: str, url: str) -> AsyncIterator[None]:
    """Turn errors of the calls that build the dataset into one message for the user.

    Raises:
        EnvironmentFailed: the server cannot be reached, does not answer, or refuses a call.
    """
    try:
        async with asyncio.timeout(START_SECONDS):
            yield
    except TimeoutError as error:
        raise EnvironmentFailed(
            f"The {what} server at {url} did not answer within {START_SECONDS:g} seconds.\n"
            "See in its log what it waits for, or start it again."
        ) from error
    except ConnectionError as error:
        raise EnvironmentFailed(f"{error}\nStart the {what} server at {url} first, or correct its URL.") from error
    except RuntimeError as error:
        raise EnvironmentFailed(f"The {what} server at {url} cannot be used: {error}") from error


@contextmanager
def _unreachable(url: str, path: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionError(f"The server at {url} did not answer {path}: {type(error).__name__} {error}") from error


def _error_of(response: httpx.Response, path: str) -> Exception:
    text = " ".join(response.text.split())[:300]
    what = f"{path} was answered with status {response.status_code}: {text}"
    return ConnectionError(what) if response.status_code in (502, 503, 504) else RuntimeError(what)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise RuntimeError(f"{response.url.path} was answered with no JSON: {response.text[:100]!r}") from error


@cache
def _certificates() -> ssl.SSLContext:
    """Loaded once: it takes longer than a call."""
    return httpx.create_ssl_context()
