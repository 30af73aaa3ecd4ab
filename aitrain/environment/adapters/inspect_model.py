"""The policy as a model of Inspect: its requests, answers, and roles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolInfo

from aitrain.environment.adapters.settings import JsonMapping, JsonObject

if TYPE_CHECKING:
    from aitrain.environment.endpoint import Endpoint

UNLIMITED = GenerateConfig(max_connections=1_000_000)
"""Without a limit on concurrent requests, which is Inspect's default: the policy answers when all episodes ask."""


@modelapi(name="aitrain")
class PolicyModel(ModelAPI):  # type: ignore[misc]
    """The policy as a model of Inspect. Requests that go on with the first conversation are trained; any other
    conversation, and all of a model that is not `trained`, is answered by the policy outside of the trajectory."""

    def __init__(self, endpoint: Endpoint, trained: bool) -> None:
        super().__init__("policy", None, None, [], GenerateConfig())
        self.endpoint, self.trained, self.others = endpoint, trained, 0
        self.first: JsonObject | None = None

    async def generate(
        self, input: Sequence[ChatMessage], tools: Sequence[ToolInfo], tool_choice: object, config: GenerateConfig
    ) -> ModelOutput:
        """The policy's answer."""
        messages = [_as_openai(message) for message in input]
        self.first = self.first or messages[0]
        is_trained = self.trained and messages[0] == self.first
        self.others += not is_trained
        answer = await self.endpoint.chat(messages, tools=[_schema(tool) for tool in tools], trained=is_trained)
        calls = [_as_call(call) for call in answer.get("tool_calls") or ()]
        message = ChatMessageAssistant(
            content=answer["content"] or "", tool_calls=calls or None, model="policy", source="generate"
        )
        return ModelOutput.from_message(message, "tool_calls" if calls else "stop")


class Roles(dict[str, object]):
    """Models by their roles; the policy, untrained, for any role that the task or the user does not fill."""

    def __init__(self, roles: JsonMapping, other: Model) -> None:
        super().__init__({name: _models(value) for name, value in roles.items()})
        self.other = other

    def __bool__(self) -> bool:
        return True  # Inspect takes another dict for one that is false

    def get(self, role: str, default: object = None) -> object:
        """The model or the models of a role."""
        return super().get(role, self.other)


def _models(value: object) -> object:
    return [get_model(one) for one in value] if isinstance(value, list) else get_model(value)


def _as_openai(message: ChatMessage) -> JsonObject:
    if message.role == "tool":
        text = message.error.message if message.error else message.text
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, "name": message.function}
    plain = {"role": message.role, "content": message.text}
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {"name": one.function, "arguments": json.dumps(one.arguments)},
            }
            for one in message.tool_calls
        ]
    return plain


def _as_call(call: JsonObject) -> ToolCall:
    function, arguments, problem = call["function"], {}, None
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        problem = f"the arguments are not valid JSON: {function['arguments']}"
    return ToolCall(id=call["id"], function=function["name"], arguments=arguments, parse_error=problem)


def _schema(tool: ToolInfo) -> JsonObject:
    parameters = tool.parameters.model_dump(exclude_none=True)
    return {"name": tool.name, "description": tool.description, "parameters": parameters}
