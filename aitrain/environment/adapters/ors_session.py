"""One session of a server of the Open Reward Standard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.env_server import EnvServer
from aitrain.environment.adapters.settings import JsonMapping, JsonObject
from aitrain.environment.adapters.tool_results import tool_schema
from aitrain.environment.tool_call_parser import ToolJson

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
