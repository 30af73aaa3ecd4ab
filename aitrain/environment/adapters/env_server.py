"""What the adapters share whose environment runs in a server of its own: HTTP calls, tool calls, rewards of steps."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from aitrain.environment.adapters.settings import AdaptedEnvironment, JsonMapping, JsonObject
from aitrain.environment.completion_parser import ToolCall, ToolJson, short
from aitrain.environment.contract import Score, ToolResult
from aitrain.environment.http_server import check_url, is_local
from aitrain.errors import ConfigError


class RewardedEpisode:
    """An episode whose steps are rewarded. Its score is their sum or the last of them; without any it is 0, as the
    policy did nothing that is rewarded."""

    def __init__(self, use: str) -> None:
        self.use, self.rewarded = use, 0.0
        self.details = dict[str, Any]()
        """What came with rewards, such as their components; the last of each name."""

    def add(self, answer: JsonMapping) -> None:
        """Add the reward of a step's answer, None is no reward, and its metadata."""
        if (reward := answer.get("reward")) is not None:
            self.rewarded = float(reward) if self.use == "last" else self.rewarded + float(reward)
        self.details |= answer.get("metadata") or {}

    def score(self) -> Score:
        """The score, with what came with rewards as metrics."""
        return Score(self.rewarded, self.details)


async def run_calls(
    calls: Sequence[ToolCall], run: Callable[[ToolCall], Awaitable[tuple[str, bool]]]
) -> list[JsonObject] | ToolResult | None:
    """The results of the calls as messages; None if there are no calls, which ends the episode.

    `run` returns a call's result, and whether it ends the episode; calls that cannot be read get their problem instead.
    """
    results: list[JsonObject] = []
    for call in calls:
        text, is_last = (f"error: {call.problem}", False) if call.problem else await run(call)
        results.append({"role": "tool", "name": call.name, "content": text})
        if is_last:
            return ToolResult(results, done=True)
    return results or None


def text_of(parts: Sequence[JsonMapping]) -> str:
    """The text of a message or a result; images are left out."""
    return "\n".join(part["text"] for part in parts if "text" in part)


def tool_schemas(tools: Sequence[JsonMapping], parameters: str = "input_schema") -> list[ToolJson]:
    """The schemas of a server's tools, as `get_tools` returns them; `parameters` is the name of that field."""
    return [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get(parameters) or {},
        }
        for tool in tools
    ]


certificates = cache(httpx.create_ssl_context)  # loading them takes longer than a call
CONNECT_SECONDS = 10.0
DEADLINE_SECONDS = 600.0  # calls of episodes have the shorter one of --rl-env-timeout


class EnvServer(httpx.AsyncClient):
    """The HTTP side of one episode, with its own cookies and headers. A server that cannot be reached raises
    ConnectionError, which is counted as a failure of the kind `server`."""

    def __init__(self, url: str) -> None:
        super().__init__(
            base_url=url,
            timeout=httpx.Timeout(DEADLINE_SECONDS, connect=CONNECT_SECONDS),
            # a kept connection may have been closed by the server while the policy generated
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not is_local(url),
            verify=certificates(),
        )

    async def ask(self, method: str, path: str, body: object = None, may_fail: bool = False) -> httpx.Response:
        """The response; with `may_fail`, also one with a 4xx status.

        Raises:
            ConnectionError: the server cannot be reached, or a gateway before it cannot.
            RuntimeError: the server answered with an error.
        """
        try:
            response = await self.request(method, path, json=body)
        except httpx.TransportError as error:
            what = f"{type(error).__name__} {error}"
            raise ConnectionError(f"The server at {self.base_url} did not answer {path}: {what}") from error
        if response.status_code >= (500 if may_fail else 400):
            what = f"{path} was answered with status {response.status_code}: {short(response.text, 300)}"
            raise ConnectionError(what) if response.status_code in (502, 503, 504) else RuntimeError(what)
        return response

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """The JSON value of the response.

        Raises:
            ConnectionError, RuntimeError: see `ask`.
            ValueError: it is no JSON.
        """
        return (await self.ask(method, path, body)).json()


@dataclass(eq=False, kw_only=True)
class ServerEnvironment(AdaptedEnvironment):
    """Base class of environments that a server plays; the id is its URL.

    Raises:
        ConfigError: the URL is none or holds credentials, there is no score_range, or `rewards` is neither.
    """

    rewards = "sum"
    isolation = None

    def __post_init__(self) -> None:
        if self.rewards not in ("sum", "last"):
            raise ConfigError(f"rl_env_config: rewards must be sum or last, not {self.rewards}")
        # before any other message shows the URL
        self.url = check_url(self.id, "Servers that want a key are not supported.")
        super().__post_init__()
