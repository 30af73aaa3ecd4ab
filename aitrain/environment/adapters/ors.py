"""Environments behind a server of the Open Reward Standard (ORS), over plain HTTP: `--rl-env ors:URL`."""

from __future__ import annotations

from collections.abc import Sequence

from aitrain.environment.adapters.env_server import EnvServer, server_url, starting
from aitrain.environment.adapters.ors_session import OpenRewardSession, text_of
from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, read_score_range
from aitrain.environment.adapters.step_rewards import StepRewards, check_use
from aitrain.environment.adapters.tool_results import StepResponse, run_calls
from aitrain.environment.contract import Score
from aitrain.environment.requirements import EnvRequirements
from aitrain.environment.tool_call_parser import ToolCall, ToolJson
from aitrain.errors import ConfigError


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
        self.requirements = EnvRequirements(score_range=read_score_range(score_range, "ors"))

    async def build_dataset(self) -> list[JsonObject]:
        """A row for each task, by its index: nothing else of a task is asked for before its episode begins."""
        async with starting("ORS", self.url), EnvServer(self.url) as server:
            names = await server.get("/list_environments")
            self.env = self.env or names[0]
            if self.env.lower() not in names:
                raise ConfigError(f"rl_env_config: there is no env {self.env} at {self.url}; it has {names}")
            count = (await server.post(f"/{self.env}/num_tasks", {"split": self.split}))["num_tasks"]
        prompt = [{"role": "system", "content": self.system}] if self.system else []
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


def check_id(id: str, settings: JsonMapping) -> None:
    """Check URL and settings without the server.

    Raises:
        ConfigError: one of them is wrong.
    """
    OpenRewardServer(id, **settings)


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
