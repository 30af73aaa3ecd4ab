"""Environments behind an OpenEnv server, over its websocket: `--rl-env openenv:URL`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aitrain.environment.adapters.env_server import (
    CONNECT_SECONDS,
    EnvServer,
    StepResponse,
    StepRewards,
    check_use,
    is_local,
    run_calls,
    server_url,
    starting,
    tool_schema,
)
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, prompted, requires
from aitrain.environment.contract import Score, ToolResult
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import AitrainError, EnvironmentFailed

NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of every action or observation, which are not the policy's."""


class ActionRefusedError(AitrainError):
    """The server does not accept an answer as an action; the message becomes the observation of the policy."""


@dataclass(frozen=True)
class OpenEnvText:
    """How actions are read and observations are shown."""

    action: JsonMapping
    """The JSON schema of actions."""
    field: str | None = None
    """The field that gets the policy's answer; None: the only required one, if there is one."""
    shown: Sequence[str] | None = None
    """Fields of observations that are shown; None: all."""

    @property
    def has_tools(self) -> bool:
        """Whether the actions are calls of MCP tools."""
        return {"tool_name", "arguments"} <= set(self.action["properties"])

    @property
    def fields(self) -> JsonObject:
        """Schemas of the fields that the policy sets."""
        return {name: schema for name, schema in self.action["properties"].items() if name not in NOT_SHOWN}

    @property
    def text_field(self) -> str | None:
        """The field that gets the policy's answer; None if the answer is the JSON object of an action."""
        required = [name for name in self.action.get("required", []) if name in self.fields]
        return self.field or (required[0] if len(required) == 1 else None)

    def action_of(self, reply: str) -> JsonObject:
        """The action that an answer is.

        Raises:
            ActionRefusedError: it holds no JSON object, where one is needed.
        """
        name = self.text_field
        if name is None:
            action = _json_object(reply)
            if not action:
                raise ActionRefusedError(f"answer with a JSON object with the fields {', '.join(self.fields)}")
            return action
        if self.fields.get(name, {}).get("type") == "string":
            return {name: reply}
        try:
            return {name: json.loads(reply)}
        except ValueError:
            return {name: reply.strip()}

    def text_of(self, observation: JsonMapping) -> str:
        """What the policy sees: the value of the only field, or all fields as JSON."""
        names = self.shown or [name for name in observation if name not in NOT_SHOWN]
        values = {name: observation.get(name) for name in names}
        value = values[names[0]] if len(names) == 1 else values
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_object(reply: str) -> JsonObject:
    """The JSON object that begins at the first brace; empty if there is none."""
    start = reply.find("{")
    try:
        return dict(json.JSONDecoder().raw_decode(reply[start:])[0]) if start >= 0 else {}
    except ValueError:
        return {}


class OpenEnvSession:
    """One session, which lasts as long as its connection: an episode whose connection is lost fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket: Any = None

    async def open(self) -> None:
        """Connect.

        Raises:
            ConnectionError: there is no server.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        proxy = {"proxy": None} if is_local(self.url) else {}
        address = self.url.replace("http", "ws", 1) + "/ws"
        try:
            # without pings of ours, as a step may take longer than they wait; those of the server are answered
            self._socket = await connect(
                address, open_timeout=CONNECT_SECONDS, max_size=None, ping_interval=None, **proxy
            )
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"The OpenEnv server at {self.url} opens no session: {error}") from error

    async def refusal(self) -> str:
        """Open the session; returns why the server refuses it, empty if it does not."""
        await self.open()
        answer = await self._exchange({"type": "state"})  # a full server says so in its first answer
        return str(answer["data"].get("message")) if _code(answer) == "CAPACITY_REACHED" else ""

    async def ask(self, kind: str, data: JsonObject) -> JsonObject:
        """The data of the answer to a message.

        Raises:
            ActionRefusedError: the data do not fit the server's schema.
            ConnectionError: the connection is lost, or the server has no session left.
            RuntimeError: the environment raised.
        """
        answer = await self._exchange({"type": kind, "data": data})
        code, content = _code(answer), answer["data"]
        if code == "VALIDATION_ERROR":
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in content.get("errors", [])]
            raise ActionRefusedError("; ".join(problems) or str(content.get("message")))
        if code == "CAPACITY_REACHED":
            raise ConnectionError(f"The OpenEnv server at {self.url} has no session left: {content.get('message')}")
        if code:
            raise RuntimeError(f"{kind} failed on the OpenEnv server: {code}: {content.get('message')}")
        return dict(content)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _exchange(self, message: JsonObject) -> JsonObject:
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # what the server said before it closed can still be read
                await self._socket.send(json.dumps(message))
            return dict(json.loads(await self._socket.recv()))
        except ConnectionClosed as error:
            raise ConnectionError(f"The OpenEnv server at {self.url} closed the session: {error}") from error


async def check_sessions(url: str, needed: int) -> None:
    """Open as many sessions as episodes need at once, and close them.

    Raises:
        EnvironmentFailed: the server allows fewer.
    """
    sessions = [OpenEnvSession(url) for _ in range(needed)]
    try:
        refusals = [why for why in await asyncio.gather(*(one.refusal() for one in sessions)) if why]
    finally:
        await asyncio.gather(*(one.close() for one in sessions))
    if refusals:
        allowed = needed - len(refusals)
        raise EnvironmentFailed(
            f"The OpenEnv server at {url} allows {allowed} of {needed} sessions at once: {refusals[0]}\n"
            f"Start it with create_app(..., max_concurrent_envs={needed}), which needs"
            " SUPPORTS_CONCURRENT_SESSIONS = True in its environment.\n"
            f"To play fewer episodes at once: --rl-env-config '{{\"sessions\": {max(1, allowed)}}}' (in each process)."
        )


def _code(answer: JsonObject) -> str:
    """The code of an answer that is an error; empty for any other."""
    return str(answer["data"].get("code") or "ERROR") if answer["type"] == "error" else ""


class OpenEnv:
    """Episodes on an OpenEnv server, one session each; case number n is reset with the seed `seed` + n. The tools of an
    MCP environment are offered as tools; for any other, the policy's answer is the action, see OpenEnvText."""

    text: OpenEnvText

    def __init__(
        self,
        url: str,
        /,
        *,
        size: int = 256,
        seed: int = 0,
        system: str | None = None,
        score_range: object = None,
        sessions: int = 64,
        split: str | None = None,
        reset: JsonMapping | None = None,
        field: str | None = None,
        shown: Sequence[str] | None = None,
        rewards: str = "sum",
        unrewarded: float | None = 0.0,
    ) -> None:
        self.url, self.size, self.seed, self.system = server_url(url, "openenv"), size, seed, system
        self.sessions, self.split, self.reset, self.field, self.shown = sessions, split, dict(reset or {}), field, shown
        self.rewards, self.unrewarded = check_use(rewards), unrewarded
        self.requirements = requires(score_range, "openenv", None, episodes_at_once=sessions)
        self.tools: list[ToolJson] = []

    async def build_dataset(self) -> list[JsonObject]:
        """A row for each case, with what its session is reset with. The server is asked for as many sessions as will be
        open at once: one that allows fewer would fail every batch."""
        async with starting("OpenEnv", self.url):
            async with EnvServer(self.url) as server:
                self.text = OpenEnvText((await server.get("/schema"))["action"], self.field, self.shown)
                resets = await self._resets(server)
            await check_sessions(self.url, self.sessions * int(os.environ.get("WORLD_SIZE", "1")))
            if self.text.has_tools:
                self.tools = await self._list_tools()
        system = self.system
        if system is None and not self.tools and self.text.text_field is None:
            system = f"Answer with a JSON object with these fields: {json.dumps(self.text.fields)}"
        return [{"prompt": prompted([], system), "reset": reset} for reset in resets]

    async def _resets(self, server: EnvServer) -> list[JsonObject]:
        if self.split is None:
            return [{**self.reset, "seed": self.seed + number} for number in range(self.size)]
        name = (await server.get("/list_environments"))[0]
        count = (await server.post(f"/{name}/num_tasks", {"split": self.split}))["num_tasks"]
        tasks = choose(range(count), self.size, self.seed or None)
        return [{**self.reset, "seed": self.seed + n, "split": self.split, "index": n} for n in tasks]

    async def _list_tools(self) -> list[ToolJson]:
        session = OpenEnvSession(self.url)
        await session.open()
        try:
            listed = (await session.ask("step", {"type": "list_tools"}))["observation"]["tools"]
        finally:
            await session.close()
        return [tool_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]

    async def start(self, case: JsonObject) -> _Episode:
        """A session of the server, and its first observation."""
        episode = _Episode(self.text, OpenEnvSession(self.url), StepRewards(self.rewards, self.unrewarded))
        try:
            await episode.begin(case["reset"])
        except BaseException:
            await episode.close()
            raise
        return episode

    def get_tools(self) -> list[ToolJson]:
        """The tools of an MCP environment."""
        return self.tools


class _Episode:
    def __init__(self, text: OpenEnvText, session: OpenEnvSession, rewards: StepRewards) -> None:
        self.text, self.session, self.rewards = text, session, rewards

    async def begin(self, reset: JsonObject) -> None:
        await self.session.open()
        self.first, _ = self._seen(await self.session.ask("reset", reset))

    def opening(self) -> str:
        return self.first

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> StepResponse:
        if self.text.has_tools:
            return await run_calls(calls, self._call)
        try:
            text, is_done = self._seen(await self.session.ask("step", self.text.action_of(reply)))
        except ActionRefusedError as error:
            return f"error: {error}"
        return ToolResult(text, done=True) if is_done else text

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        return self._seen(await self.session.ask("step", action))

    def _seen(self, data: JsonObject) -> tuple[str, bool]:
        """What the policy sees, and whether the episode is over."""
        self.rewards.add(data.get("reward"), data.get("metadata"))
        return self.text.text_of(data["observation"]), bool(data.get("done"))

    def score(self) -> Score:
        return self.rewards.score

    async def close(self) -> None:
        await self.session.close()
