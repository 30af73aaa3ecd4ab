"""Environments behind a server of the Open Reward Standard (ORS), over plain HTTP: `--rl-env ors:URL`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.env_server import (
    EnvServer,
    StepResponse,
    StepRewards,
    check_use,
    run_calls,
    server_url,
    starting,
    tool_schema,
)
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, prompted, requires
from aitrain.environment.contract import Score
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import ConfigError

PING_SECONDS = 60.0
"""A server ends sessions that it has not heard of for a quarter of an hour."""


class OpenRewardSession:
    """One session: its prompt, its tools, and their calls."""

    def __init__(self, url: str, env: str) -> None:
        self.server, self.env = EnvServer(url), env
        self.messages: list[JsonObject] = []
        """The prompt."""
        self.tools: list[ToolJson] = []
        self.terminal: JsonObject | None = None
        """The tool that an answer without a call goes to, with the name of its argument, `arg`."""
        self._ping: asyncio.Task[None] | None = None

    async def open(self, split: str, index: int) -> None:
        """Begin the session of a task."""
        async for name, data in self.server.events("/create_session", {}):
            if name == "task_id":
                self.server.headers["X-Session-ID"] = data.strip()
        await self.server.post("/create", {"env_name": self.env, "split": split, "index": index})
        self.messages = await self._prompt()
        listed = await self._first_of("task_tools", "tools")
        self.tools = [tool_schema(one["name"], one["description"], one["input_schema"]) for one in listed["tools"]]
        self.terminal = listed.get("terminal_tool")
        self._ping = asyncio.ensure_future(self._ping_forever())

    async def call(self, name: str, arguments: JsonMapping) -> JsonObject:
        """The output of a tool; for arguments that it refuses, one that says so.

        Raises:
            RuntimeError: the tool raised.
            ConnectionError: the server did not finish the call.
        """
        parts, is_complete = [], False
        async for event, data in self.server.events(f"/{self.env}/call", {"name": name, "input": arguments}):
            if event == "error":
                raise RuntimeError(f"the tool {name} raised on the server: {data}")
            if event in ("chunk", "end"):
                parts.append(data)
            is_complete = is_complete or event == "end"
        if not is_complete:
            raise ConnectionError(f"The server at {self.server.url} ended the call of {name} without a result")
        result = json.loads("".join(parts))
        return dict(result["output"]) if result["ok"] else {"text": f"error: {result['error']}"}

    async def close(self) -> None:
        """End the session."""
        if self._ping is not None:
            self._ping.cancel()
        with suppress(ConnectionError, RuntimeError):
            for path in ("/delete", "/delete_session"):
                await self.server.request("POST", path, may_fail=True)
        await self.server.close()

    async def _prompt(self) -> list[JsonObject]:
        """The task's messages; older servers have only the text of one."""
        given = await self._first_of("messages", "prompt")
        given = given if given and "role" in given[0] else [{"role": "user", "blocks": given}]
        return [{"role": one["role"], "content": text_of(one["blocks"])} for one in given]

    async def _first_of(self, newer: str, older: str) -> Any:
        response = await self.server.request("GET", f"/{self.env}/{newer}", may_fail=True)
        return response.json() if response.status_code == 200 else await self.server.get(f"/{self.env}/{older}")

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            with suppress(ConnectionError, RuntimeError):  # the next call of the episode says what is wrong
                await self.server.post("/ping")


def text_of(blocks: Sequence[JsonMapping]) -> str:
    """The text of a prompt or a result; images are left out."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


class OpenRewardServer:
    """The tasks of one environment of an ORS server. Each episode is a session of the server, which gives prompt and
    tools when it begins. It ends with a tool that says so, or with an answer without a call."""

    def __init__(
        self,
        url: str,
        /,
        *,
        env: str | None = None,
        split: str = "train",
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        score_range: object = None,
        rewards: str = "last",
        unrewarded: float | None = 0.0,
    ) -> None:
        self.url, self.env, self.split = server_url(url, "ors"), env, split
        self.size, self.seed, self.system = size, seed, system
        self.rewards, self.unrewarded = check_use(rewards), unrewarded
        self.requirements = requires(score_range, "ors", None)

    async def build_dataset(self) -> list[JsonObject]:
        """A row for each task, by its index: nothing else of a task is asked for before its episode begins."""
        async with starting("ORS", self.url), EnvServer(self.url) as server:
            names = await server.get("/list_environments")
            self.env = self.env or names[0]
            if self.env.lower() not in names:
                raise ConfigError(f"rl_env_config: there is no env {self.env} at {self.url}; it has {names}")
            count = (await server.post(f"/{self.env}/num_tasks", {"split": self.split}))["num_tasks"]
        prompt = prompted([], self.system)
        return [{"prompt": prompt, "index": index} for index in choose(range(count), self.size, self.seed)]

    async def start(self, index: int) -> _Episode:
        """The session of a task."""
        session = OpenRewardSession(self.url, str(self.env))
        try:
            await session.open(self.split, index)
        except BaseException:
            await session.close()
            raise
        return _Episode(session, StepRewards(self.rewards, self.unrewarded))


class _Episode:
    def __init__(self, session: OpenRewardSession, rewards: StepRewards) -> None:
        self.session, self.rewards = session, rewards

    def opening(self) -> list[JsonObject]:
        return self.session.messages

    def get_tools(self) -> list[ToolJson]:
        return self.session.tools

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> StepResponse:
        terminal = self.session.terminal
        if not calls and terminal is not None:
            await self._run(terminal["name"], {terminal["arg"]: reply} if terminal.get("arg") else {})
        return await run_calls(calls, self._call)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        output = await self._run(call.name, call.arguments or {})
        text = output["text"] if "text" in output else text_of(output["blocks"])
        return text, bool(output.get("finished"))

    async def _run(self, name: str, arguments: JsonObject) -> JsonObject:
        output = await self.session.call(name, arguments)
        self.rewards.add(output.get("reward"), output.get("metadata"))
        return output

    def score(self) -> Score:
        return self.rewards.score

    async def close(self) -> None:
        await self.session.close()
