"""Resources servers of NeMo Gym, over HTTP: `--rl-env nemo-gym:URL`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.env_server import (
    EnvServer,
    StepResponse,
    is_number,
    run_calls,
    server_url,
    starting,
    tool_schema,
)
from aitrain.environment.adapters.rows import ratios_of, read_rows
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, prompted, requires
from aitrain.environment.contract import Score
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import EnvironmentFailed


class NeMoGym:
    """The rows of a JSONL file, played with a resources server: tools are its routes, and `/verify` scores an episode.
    The policy takes the place of the agent's and the model's server."""

    def __init__(
        self,
        url: str,
        /,
        *,
        data: str,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        score_range: object = None,
        done_flag: bool = False,
    ) -> None:
        self.url, self.data, self.done_flag = server_url(url, "nemo-gym"), data, done_flag
        self.size, self.seed, self.system = size, seed, system
        self.requirements = requires(score_range, "nemo-gym", None)
        ratios_of(data)

    async def build_dataset(self) -> list[JsonObject]:
        """The file's rows, which hold prompt, tools, and what the server needs for the score."""
        rows = [self._case(place, task) for place, task in read_rows(self.data)]
        async with starting("NeMo Gym", self.url), EnvServer(self.url) as server:
            with suppress(RuntimeError):  # any answer will do
                await server.get("/")
        return choose(rows, self.size, self.seed)

    def _case(self, place: str, task: Any) -> JsonObject:
        try:
            given = task["responses_create_params"]["input"]
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            prompt = prompted([_message(one) for one in messages], self.system)
        except (KeyError, TypeError):
            raise EnvironmentFailed(f"{place}: there is no responses_create_params.input with messages") from None
        return {"prompt": prompt, "task": task}

    async def start(self, task: JsonObject) -> _Episode:
        """A session of the server; its cookie is what the server knows it by."""
        server = EnvServer(self.url)
        try:
            await server.post("/seed_session", task)
        except BaseException:
            await server.close()
            raise
        return _Episode(server, task, self.done_flag)


class _Episode:
    def __init__(self, server: EnvServer, task: JsonObject, done_flag: bool) -> None:
        self.server, self.task, self.done_flag = server, task, done_flag
        self.output: list[JsonObject] = []

    def get_tools(self) -> list[ToolJson]:
        tools = self.task["responses_create_params"].get("tools") or []
        return [tool_schema(tool["name"], tool.get("description"), tool.get("parameters")) for tool in tools]

    async def step(self, reply: str, calls: Sequence[ToolCall]) -> StepResponse:
        if reply or not calls:
            text = {"type": "output_text", "text": reply, "annotations": []}
            self._add("message", role="assistant", content=[text])
        return await run_calls(calls, self._call)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """The tool's result, which may be an error, and whether it ends the episode."""
        call_id, arguments = f"call_{len(self.output)}", call.arguments or {}
        self._add("function_call", name=call.name, arguments=json.dumps(arguments), call_id=call_id)
        if call.name in [tool["name"] for tool in self.get_tools()]:
            result = (await self.server.request("POST", f"/{call.name}", arguments, may_fail=True)).text
        else:
            result = f"error: there is no tool {call.name}"
        self._add("function_call_output", call_id=call_id, output=result)
        return result, self.done_flag and _says_done(result)

    def _add(self, kind: str, **fields: Any) -> None:
        self.output.append({"type": kind, "id": f"item_{len(self.output)}", "status": "completed", **fields})

    async def score(self) -> Score:
        params = self.task["responses_create_params"]
        response = {
            "id": "response", "created_at": time.time(), "model": "policy", "object": "response", "output": self.output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": params.get("tools") or [],
        }  # fmt: skip
        verified = await self.server.post("/verify", {**self.task, "response": response})
        numbers = {**verified, **(verified.get("reward_components") or {})}
        metrics = {key: float(value) for key, value in numbers.items() if is_number(value) and key not in self.task}
        reward = metrics.pop("reward")
        return Score(None if verified.get("mask_sample") else reward, metrics)

    async def close(self) -> None:
        await self.server.close()


def _message(given: JsonMapping) -> JsonObject:
    """A message of the Responses API as one of a chat."""
    content = given["content"]
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if "text" in part)
    return {"role": "system" if given["role"] == "developer" else given["role"], "content": content}


def _says_done(result: str) -> bool:
    try:
        value = json.loads(result)
    except ValueError:
        return False
    return isinstance(value, dict) and bool(value.get("done"))
