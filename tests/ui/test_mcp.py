"""`aitrain mcp`: a real client of the protocol checks an environment, trains, follows the run and reads its result."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

OPTIONS = {
    "model": "tiny", "rl_env": "envs.arithmetic", "max_steps": 1, "eval_cases": 2, "rl_max_new_tokens": 4,
    "rl_kl_coef": 0, "project_name": "agent",
}  # fmt: skip


@pytest.mark.slow
def test_an_agent_checks_starts_follows_and_reads_a_run(tmp_path: Path, preloaded_aitrain: Path) -> None:
    asyncio.run(asyncio.wait_for(work_through_a_run(str(preloaded_aitrain / "aitrain"), tmp_path), 240))


async def work_through_a_run(aitrain: str, folder: Path) -> None:
    server = StdioServerParameters(command=aitrain, args=["mcp"], cwd=folder, env=dict(os.environ))
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        named = {tool.name for tool in (await session.list_tools()).tools}
        assert named == {"check", "plan", "start", "status", "show", "eval", "compare", "options"}

        async def call(name: str, fails: bool = False, **arguments: Any) -> Any:
            result = await session.call_tool(name, arguments)
            assert result.is_error == fails, result
            return json.loads(result.content[0].text.removeprefix(f"Error executing tool {name}: "))

        assert any("clip" in one["name"] for one in (await call("options", words=["clip"]))["output"])
        assert "nosuch" in (await call("plan", fails=True, options={"nosuch": 1}))["message"]
        assert (await call("check", environment="envs.arithmetic"))["exit_code"] == 0
        assert "nowhere.py" in (await call("start", fails=True, options={**OPTIONS, "rl_env": "nowhere.py"}))["message"]
        assert (await call("plan", options=OPTIONS))["completions_per_step"] == 8
        started = await call("start", options=OPTIONS)
        assert started["event"] == "RunStarted"
        while (found := await call("status", run="agent"))["output"][0]["status"] == "running":
            await asyncio.sleep(0.3)
        assert found["output"][0]["status"] == "finished", found
        assert "agent" in json.dumps(await call("show", run=started["folder"]))
