"""An OpenEnv server whose environment has MCP tools, made with the openenv package."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from serving import serve


class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("adder")

        @tools.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(metadata={"seed": seed or 0})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    serve(create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8))
