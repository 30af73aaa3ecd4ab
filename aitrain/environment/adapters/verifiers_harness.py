"""The program of an agent of verifiers 0.4: a chat loop with the task's tools in this process, which takes milliseconds
where verifiers' own starts a program for each episode. Imported by verifiers under the name in `verifiers.py`."""

from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from aitrain.environment.adapters.settings import JsonObject, prompted
from aitrain.environment.completion_parser import parse_call
from aitrain.environment.contract import as_messages


def messages_of(data: Any) -> list[JsonObject]:
    """The messages that a task begins with."""
    asked = as_messages(data.prompt or [])
    wired = asked if isinstance(data.prompt, str) else list(map(message_to_wire, asked))
    return prompted(wired, data.system_prompt or None)


class ChatLoop(NullHarness):  # type: ignore[misc]
    """Asks the model, runs the tools it calls, and asks again until it calls none."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None:
        """There is no program to install."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Run the loop against verifiers' own address, which records the conversation."""
        messages = messages_of(data)
        servers_of_tools = {name: {"url": url, "timeout": 60} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": servers_of_tools}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None))
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": tools}
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                if response.is_error:
                    return ProgramResult(1, "", response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for part in message["tool_calls"]:
                    call = parse_call(part["function"])
                    if call.name not in dispatch:
                        content = f"error: there is no tool {call.name}; tools: {', '.join(dispatch)}"
                    elif call.problem:
                        content = f"error: {call.problem}"
                    else:
                        content = await call_mcp(servers, dispatch, call.name, call.arguments)
                    messages.append({"role": "tool", "tool_call_id": part["id"], "content": content})


__all__ = ["ChatLoop"]
