"""Runs the tool calls of an answer on a server, for `step(reply, calls)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aitrain.environment.contract import ToolResult
from aitrain.environment.tool_call_parser import ToolCall, ToolJson

ChatMessages = list[dict[str, object]]
StepResponse = ChatMessages | ToolResult | str | None
"""What a `step` returns."""


async def run_calls(
    calls: Sequence[ToolCall], run: Callable[[ToolCall], Awaitable[tuple[str, bool]]]
) -> ChatMessages | ToolResult | None:
    """The results of the calls as messages; None if there are no calls, which ends the episode.

    `run` returns a call's result, and whether it ends the episode; calls that cannot be read get their problem instead.
    """
    results: ChatMessages = []
    for call in calls:
        text, is_last = (f"error: {call.problem}", False) if call.problem else await run(call)
        results.append({"role": "tool", "name": call.name, "content": text})
        if is_last:
            return ToolResult(results, done=True)
    return results or None


def tool_schema(name: str, description: str | None, parameters: object) -> ToolJson:
    """The schema of a tool, as `get_tools` returns it."""
    return {"name": name, "description": description or "", "parameters": parameters or {}}
