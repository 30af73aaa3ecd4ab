"""Environments behind a server of the Open Reward Standard (ORS), over plain HTTP: `--rl-env ors:URL`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from aitrain.environment.adapters.env_server import (
    EnvServer,
    RewardedEpisode,
    ServerEnvironment,
    run_calls,
    text_of,
    tool_schemas,
)
from aitrain.environment.adapters.settings import JsonObject, prompted
from aitrain.environment.completion_parser import ToolCall, ToolJson

EVENT = re.compile(r"^event: ?(.*?)\r?\ndata: ?(.*?)\r?$", re.MULTILINE)
"""Name and data of a server-sent event. JSON is on one line; only one space is left out, as it may begin with more."""


@dataclass(eq=False, kw_only=True)
class OpenRewardServer(ServerEnvironment):
    """The tasks of one environment of an ORS server. Each episode is a session of the server, which gives prompt and
    tools when it begins. It ends with a tool that says so, or with an answer without a call."""

    env: str | None = None
    split: str = "train"
    rewards: str = "last"

    async def build_dataset(self) -> list[JsonObject]:
        """A row for each task, by its index: nothing else of a task is asked for before its episode begins."""
        async with EnvServer(self.url) as server:
            self.env = self.env or (await server.json("GET", "/list_environments"))[0]
            count = (await server.json("POST", f"/{self.env}/num_tasks", {"split": self.split}))["num_tasks"]
        return [{"prompt": prompted([], self.system), "index": index} for index in self.choose(range(count))]

    def start(self, index: int) -> OpenRewardSession:
        """The session of a task."""
        return OpenRewardSession(self, {"env_name": self.env, "split": self.split, "index": index})


class OpenRewardSession(RewardedEpisode):
    """One session, which is one episode: its prompt, its tools, and their calls."""

    def __init__(self, owner: OpenRewardServer, task: JsonObject) -> None:
        super().__init__(owner.rewards)
        self.server, self.env, self.task = EnvServer(owner.url), owner.env, task
        self.terminal: JsonObject | None = None
        """The tool that an answer without a call goes to, with the name of its argument, `arg`."""

    async def get_tools(self) -> list[ToolJson]:
        """Begin the session; returns the task's tools, which are asked for first."""
        created = await self.server.ask("POST", "/create_session", {})
        self.server.headers["X-Session-ID"] = dict(EVENT.findall(created.text))["task_id"]
        await self.server.ask("POST", "/create", self.task)
        listed = await self.server.json("GET", f"/{self.env}/task_tools")
        self.terminal = listed.get("terminal_tool")
        return tool_schemas(listed["tools"])

    async def opening(self) -> list[JsonObject]:
        """The task's messages."""
        given = await self.server.json("GET", f"/{self.env}/messages")
        return [{"role": one["role"], "content": text_of(one["blocks"])} for one in given]

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> object:
        """Run the calls; an answer without one goes to the terminal tool, if there is one."""
        if not calls and self.terminal is not None:
            argument = self.terminal.get("arg")
            await self.run(ToolCall(self.terminal["name"], {argument: reply} if argument else {}))
        return await run_calls(calls, self.run)

    async def run(self, call: ToolCall) -> tuple[str, bool]:
        """What a tool says, which for arguments that it refuses is why, and whether it ends the episode.

        Raises:
            RuntimeError: the tool raised.
            ConnectionError: the server did not finish the call.
        """
        response = await self.server.ask("POST", f"/{self.env}/call", {"name": call.name, "input": call.arguments})
        events = EVENT.findall(response.text)
        last = dict(events)
        if "error" in last:
            raise RuntimeError(f"the tool {call.name} raised on the server: {last['error']}")
        if "end" not in last:
            raise ConnectionError(
                f"The server at {self.server.base_url} ended the call of {call.name} without a result"
            )
        result = json.loads("".join(data for event, data in events if event in ("chunk", "end")))
        if not result["ok"]:
            return f"error: {result['error']}", False
        output = result["output"]
        self.add(output)
        return text_of(output["blocks"]), bool(output.get("finished"))

    async def close(self) -> None:
        """End the session."""
        with suppress(ConnectionError, RuntimeError):
            for path in ("/delete", "/delete_session"):
                await self.server.ask("POST", path, may_fail=True)
        await self.server.aclose()
