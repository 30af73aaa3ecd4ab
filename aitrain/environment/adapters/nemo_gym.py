"""Resources servers of NeMo Gym, over HTTP: `--rl-env nemo-gym:URL`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.environment.adapters.env_server import (
    EnvServer,
    ServerEnvironment,
    run_calls,
    text_of,
    tool_schemas,
)
from aitrain.environment.adapters.rows import read_rows
from aitrain.environment.adapters.settings import JsonObject, prompted
from aitrain.environment.completion_parser import ToolCall, ToolJson
from aitrain.environment.contract import Score, as_messages
from aitrain.errors import EnvironmentFailed


@dataclass(eq=False, kw_only=True)
class NeMoGym(ServerEnvironment):
    """The rows of a JSONL file, played with a resources server: tools are its routes, and `/verify` scores an episode.
    The policy takes the place of the agent's and the model's server."""

    data: str

    async def build_dataset(self) -> list[JsonObject]:
        """The file's rows, which hold prompt, tools, and what the server needs for the score."""
        rows = []
        for place, task in read_rows(self.data):
            try:
                given = as_messages(task["responses_create_params"]["input"])
                rows.append({"prompt": prompted(list(map(_message, given)), self.system), "task": task})
            except (KeyError, TypeError):
                raise EnvironmentFailed(f"{place}: there is no responses_create_params.input with messages") from None
        return self.choose(rows)

    def start(self, task: JsonObject) -> NeMoGymSession:
        """A session of the server; its cookie is what the server knows it by."""
        return NeMoGymSession(EnvServer(self.url), task)


class NeMoGymSession:
    """One episode, with what was said in the form of the Responses API."""

    def __init__(self, server: EnvServer, task: JsonObject) -> None:
        self.server, self.task = server, task
        self.tools = task["responses_create_params"].get("tools") or []
        self.output: list[JsonObject] = []

    async def opening(self) -> None:
        """Begin the session; the row's prompt is all that is said."""
        await self.server.ask("POST", "/seed_session", self.task)

    def get_tools(self) -> list[ToolJson]:
        """The row's tools."""
        return tool_schemas(self.tools, "parameters")

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> object:
        """Run the calls; without any the episode is over."""
        if reply or not calls:
            text = {"type": "output_text", "text": reply, "annotations": []}
            self._add("message", role="assistant", content=[text])
        return await run_calls(calls, self._call)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """The tool's result, which may be an error; it ends no episode."""
        call_id, arguments = f"call_{len(self.output)}", call.arguments or {}
        self._add("function_call", name=call.name, arguments=json.dumps(arguments), call_id=call_id)
        result = f"error: there is no tool {call.name}"
        if call.name in [tool["name"] for tool in self.tools]:
            result = (await self.server.ask("POST", f"/{call.name}", arguments, may_fail=True)).text
        self._add("function_call_output", call_id=call_id, output=result)
        return result, False

    def _add(self, kind: str, **fields: Any) -> None:
        self.output.append({"type": kind, "id": f"item_{len(self.output)}", "status": "completed", **fields})

    async def score(self) -> Score:
        """The server's reward, with the numbers beside it as metrics."""
        response = {
            "id": "response", "created_at": 0, "model": "policy", "object": "response", "output": self.output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": self.tools,
        }  # fmt: skip
        verified = await self.server.json("POST", "/verify", {**self.task, "response": response})
        given = {**verified, **(verified.get("reward_components") or {})}
        metrics = {name: value for name, value in given.items() if name not in self.task and name != "reward"}
        return Score(None if verified.get("mask_sample") else verified["reward"], metrics)

    async def close(self) -> None:
        """Close the connections."""
        await self.server.aclose()


def _message(given: JsonObject) -> JsonObject:
    """A message of the Responses API as one of a chat."""
    content = given["content"] if isinstance(given["content"], str) else text_of(given["content"])
    return {"role": "system" if given["role"] == "developer" else given["role"], "content": content}
