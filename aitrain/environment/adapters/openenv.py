"""Environments behind an OpenEnv server, over its websocket: `--rl-env openenv:URL`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from aitrain.environment.adapters.env_server import EnvServer, server_url, starting
from aitrain.environment.adapters.openenv_session import OpenEnvSession, check_sessions
from aitrain.environment.adapters.openenv_text import ActionRefusedError, OpenEnvText
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, read_score_range
from aitrain.environment.adapters.step_rewards import StepRewards, check_use
from aitrain.environment.adapters.tool_results import StepResponse, run_calls, tool_schema
from aitrain.environment.contract import Score, ToolResult
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.tool_call_parser import ToolCall, ToolJson


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
        bounds = read_score_range(score_range, "openenv")
        self.requirements = EnvRequirements(score_range=bounds, episodes_at_once=sessions)
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
        prompt = [{"role": "system", "content": system}] if system else []
        return [{"prompt": prompt, "reset": reset} for reset in resets]

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


def check_id(id: str, settings: JsonMapping) -> None:
    """Check URL and settings without the server.

    Raises:
        ConfigError: one of them is wrong.
    """
    OpenEnv(id, **settings)


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
