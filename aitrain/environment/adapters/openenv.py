"""Environments behind an OpenEnv server, over its websocket: `--rl-env openenv:URL`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from aitrain.environment.adapters.env_server import (
    CONNECT_SECONDS,
    EnvServer,
    RewardedEpisode,
    ServerEnvironment,
    run_calls,
    tool_schemas,
)
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, prompted
from aitrain.environment.completion_parser import ToolCall, ToolJson
from aitrain.environment.contract import ToolResult
from aitrain.environment.http_server import is_local
from aitrain.errors import AitrainError

NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of every action or observation, which are not the policy's."""


class ActionRefusedError(AitrainError):
    """The server does not accept an answer as an action; the message becomes the observation of the policy."""


@dataclass(eq=False, kw_only=True)
class OpenEnv(ServerEnvironment):
    """Episodes on an OpenEnv server, one session each; case number n is reset with the seed `seed` + n. The tools of an
    MCP environment are offered as tools; for any other, the policy's answer is the action, see `action_of`."""

    size: int = 256
    seed: int = 0
    sessions: int = 64
    reset: JsonMapping | None = None
    rewards: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requirements = replace(self.requirements, episodes_at_once=self.sessions)

    async def build_dataset(self) -> list[JsonObject]:
        """A row for each case, with what its session is reset with."""
        async with EnvServer(self.url) as server:
            self.read_schema((await server.json("GET", "/schema"))["action"])
        system = self.system
        if system is None and not self.has_tools and self.text_field is None:
            system = f"Answer with a JSON object with these fields: {json.dumps(self.fields)}"
        prompt, own = prompted([], system), self.reset or {}
        return [{"prompt": prompt, "reset": {**own, "seed": self.seed + number}} for number in range(self.size)]

    def start(self, reset: JsonObject) -> OpenEnvSession:
        """A session of the server."""
        return OpenEnvSession(self, reset)

    # -- answers as actions, observations as text

    def read_schema(self, action: JsonMapping) -> None:
        """Find out what the policy says, by the JSON schema of actions."""
        self.fields = {name: schema for name, schema in action["properties"].items() if name not in NOT_SHOWN}
        """Schemas of the fields of actions that the policy sets."""
        self.has_tools = {"tool_name", "arguments"} <= self.fields.keys()
        """Whether the actions are calls of MCP tools."""
        required = [name for name in action.get("required", []) if name in self.fields]
        self.text_field: str | None = required[0] if len(required) == 1 else None
        """The only required field, which gets the policy's answer; None if that is the JSON object of an action."""

    def action_of(self, reply: str) -> JsonObject:
        """The action that an answer is.

        Raises:
            ActionRefusedError: it holds no JSON object, where one is needed.
        """
        name = self.text_field
        try:
            if name is None:  # the object that begins at the first brace
                return dict(json.JSONDecoder().raw_decode(reply[reply.index("{") :])[0])
            return {name: reply if self.fields[name].get("type") == "string" else json.loads(reply)}
        except ValueError:
            if name is None:
                raise ActionRefusedError(
                    f"answer with a JSON object with the fields {', '.join(self.fields)}"
                ) from None
            return {name: reply.strip()}

    def text_of(self, observation: JsonMapping) -> str:
        """What the policy sees: the value of the only field, or all fields as JSON."""
        values = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
        value = next(iter(values.values())) if len(values) == 1 else values
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class OpenEnvSession(RewardedEpisode):
    """One session, which is one episode. It lasts as long as its connection: an episode whose connection is lost
    fails."""

    def __init__(self, owner: OpenEnv, reset: JsonObject) -> None:
        super().__init__(owner.rewards)
        self.owner, self.reset = owner, reset
        self.socket: Any = None

    async def ask(self, kind: str, data: JsonObject) -> JsonObject:
        """The data of the answer to a message; the first one connects.

        Raises:
            ActionRefusedError: the data do not fit the server's schema.
            ConnectionError: there is no server, it has no session left, or the connection is lost.
            RuntimeError: the environment raised.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            if self.socket is None:
                # without pings of ours, as a step may take longer than they wait; those of the server are answered
                self.socket = await connect(
                    self.owner.url.replace("http", "ws", 1) + "/ws",
                    open_timeout=CONNECT_SECONDS, max_size=None, ping_interval=None,
                    proxy=None if is_local(self.owner.url) else True,
                )  # fmt: skip
            with suppress(ConnectionClosed):  # what the server said before it closed can still be read
                await self.socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self.socket.recv())
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"The server at {self.owner.url} opened no session, or closed it: {error}") from error
        content: JsonObject = answer["data"]
        if answer["type"] != "error":
            return content
        code, message = content.get("code"), content.get("message")
        if code == "VALIDATION_ERROR":
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in content.get("errors", [])]
            raise ActionRefusedError("; ".join(problems) or str(message))
        if code == "CAPACITY_REACHED":
            raise ConnectionError(
                f"The server has no session left: {message}\nStart it with create_app(..., max_concurrent_envs=N)"
                " and SUPPORTS_CONCURRENT_SESSIONS, or play fewer episodes at once, with `sessions` in --rl-env-config."
            )
        raise RuntimeError(f"{kind} failed on the OpenEnv server: {code or 'ERROR'}: {message}")

    async def play(self, kind: str, data: JsonObject) -> tuple[str, bool]:
        """What the policy sees after a reset or a step, and whether the episode is over.

        Raises:
            Exception: see `ask`.
        """
        answer = await self.ask(kind, data)
        self.add(answer)
        return self.owner.text_of(answer["observation"]), bool(answer.get("done"))

    async def get_tools(self) -> list[ToolJson]:
        """The tools of an MCP environment."""
        if not self.owner.has_tools:
            return []
        listed = await self.ask("step", {"type": "list_tools"})
        return tool_schemas(listed["observation"]["tools"])

    async def opening(self) -> str:
        """Begin the episode; returns the first observation."""
        return (await self.play("reset", self.reset))[0]

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> object:
        """Run the tool calls; without tools the answer is the action."""
        if self.owner.has_tools:
            return await run_calls(calls, self._call)
        try:
            text, is_done = await self.play("step", self.owner.action_of(reply))
        except ActionRefusedError as error:
            return f"error: {error}"
        return ToolResult(text, done=is_done)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        return await self.play("step", {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})

    async def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            await self.socket.close()
