"""Environments behind a server of the Open Reward Standard (ORS), over plain HTTP: `--rl-env ors:URL`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.env_server import EnvServer, server_url, starting
from aitrain.environment.adapters.settings import choose, read_score_range
from aitrain.environment.adapters.step_rewards import StepRewards, check_use
from aitrain.environment.adapters.tool_results import run_calls, tool_schema
from aitrain.environment.contract import Score
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import ConfigError

PING_SECONDS = 60.0
"""A server ends sessions that it has not heard of for a quarter of an hour."""


class OpenRewardServer:
    """The tasks of one environment of an ORS server. Each episode is a session of the server, which gives prompt and
    tools when it begins. An answer without a tool call ends the episode, as does a tool that says so."""

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
        self.requirements = EnvRequirements(score_range=read_score_range(score_range, "ors"))

    async def build_dataset(self) -> list[dict[str, Any]]:
        """A row for each task, by its index: nothing else of a task is asked for before its episode begins."""
        with starting("ORS", self.url):
            async with EnvServer(self.url) as server:
                names = await server.get("/list_environments")
                self.env = self.env or names[0]
                if self.env.lower() not in names:
                    raise ConfigError(f"rl_env_config: there is no env {self.env} at {self.url}; it has {names}")
                count = (await server.post(f"/{self.env}/num_tasks", {"split": self.split}))["num_tasks"]
        prompt = [{"role": "system", "content": self.system}] if self.system else []
        return [{"prompt": prompt, "index": index} for index in choose(range(count), self.size, self.seed)]

    async def start(self, index: int) -> _Episode:
        """The session of a task."""
        episode = _Episode(EnvServer(self.url), f"/{self.env}", StepRewards(self.rewards, self.unrewarded))
        try:
            await episode.begin({"env_name": self.env, "split": self.split, "index": index})
        except BaseException:
            await episode.close()
            raise
        return episode


def check_id(id: str, settings: Mapping[str, Any]) -> None:
    """Check URL and settings without the server.

    Raises:
        ConfigError: one of them is wrong.
    """
    OpenRewardServer(id, **settings)


class _Episode:
    def __init__(self, server: EnvServer, path: str, rewards: StepRewards) -> None:
        self.server, self.path, self.rewards = server, path, rewards
        self.prompt, self.tools = "", list[ToolJson]()
        self.ping: asyncio.Task[None] | None = None

    async def begin(self, task: dict[str, Any]) -> None:
        async for name, data in self.server.events("/create_session", {}):
            if name == "task_id":
                self.server.headers["X-Session-ID"] = data.strip()
        await self.server.post("/create", task)
        self.prompt = _text(await self.server.get(f"{self.path}/prompt"))
        listed = await self.server.request("GET", f"{self.path}/task_tools", may_fail=True)
        tools = listed.json() if listed.status_code == 200 else await self.server.get(f"{self.path}/tools")
        self.tools = [tool_schema(one["name"], one["description"], one["input_schema"]) for one in tools["tools"]]
        self.ping = asyncio.ensure_future(self._ping())

    def opening(self) -> str:
        return self.prompt

    def get_tools(self) -> list[ToolJson]:
        return self.tools

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> Any:
        return await run_calls(calls, self._call)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """The tool's result, and whether the episode is finished."""
        parts, end = [], False
        async for name, data in self.server.events(f"{self.path}/call", {"name": call.name, "input": call.arguments}):
            if name == "error":
                raise RuntimeError(f"the tool {call.name} raised on the server: {data}")
            if name in ("chunk", "end"):
                parts.append(data)
            end = end or name == "end"
        if not end:
            raise ConnectionError(f"The server at {self.server.url} ended the call of {call.name} without a result")
        result = json.loads("".join(parts))
        if not result["ok"]:
            return f"error: {result['error']}", False
        output = result["output"]
        self.rewards.add(output.get("reward"), output.get("metadata"))
        return _text(output["blocks"]), bool(output.get("finished"))

    def score(self) -> Score:
        return self.rewards.score

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            with suppress(ConnectionError, RuntimeError):  # the next call of the episode says what is wrong
                await self.server.post("/ping")

    async def close(self) -> None:
        if self.ping is not None:
            self.ping.cancel()
        with suppress(ConnectionError, RuntimeError):
            for path in ("/delete", "/delete_session"):
                await self.server.request("POST", path, may_fail=True)
        await self.server.close()


def _text(blocks: Sequence[dict[str, Any]]) -> str:
    """The text of a prompt or a result; images are left out."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")
