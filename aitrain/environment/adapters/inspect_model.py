"""The policy as a model of Inspect. What is used of Inspect's private API is imported here and in `inspect.py`, and
nowhere else."""

from collections.abc import Sequence

from inspect_ai.model import ChatMessage, ChatMessageAssistant, GenerateConfig, ModelAPI, ModelOutput, modelapi
from inspect_ai.model._call_tools import parse_tool_call
from inspect_ai.solver._task_state import sample_state
from inspect_ai.tool import ToolInfo
from inspect_ai.util import LimitExceededError

from aitrain.environment.adapters.settings import JsonObject
from aitrain.environment.endpoint import Endpoint
from aitrain.errors import EpisodeTruncated


@modelapi(name="aitrain")
class PolicyModel(ModelAPI):  # type: ignore[misc]
    """The policy, also in roles that nothing fills. Requests that go on with the first conversation are trained until
    the scorers ask; any other is answered by the policy outside of the trajectory."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("policy")
        self.endpoint, self.untrained = endpoint, 0
        self.first: JsonObject | None = None

    async def generate(
        self, input: Sequence[ChatMessage], tools: Sequence[ToolInfo], tool_choice: object, config: GenerateConfig
    ) -> ModelOutput:
        """The policy's answer. A limit of the run is one of Inspect, at which the sample is scored as it stands."""
        messages = [_as_openai(message) for message in input]
        self.first = self.first or messages[0]
        is_trained = messages[0] == self.first and not sample_state().completed
        self.untrained += not is_trained
        # options are for the models of providers
        schemas = [tool.model_dump(exclude={"options"}, exclude_none=True) for tool in tools]
        try:
            answer = await self.endpoint.chat(messages, tools=schemas, trained=is_trained)
        except EpisodeTruncated as error:
            raise LimitExceededError("custom", value=0, limit=0, message=str(error)) from error
        calls = [
            parse_tool_call(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in answer.get("tool_calls") or ()
        ]
        message = ChatMessageAssistant(
            content=answer["content"] or "", tool_calls=calls or None, model="policy", source="generate"
        )
        return ModelOutput.from_message(message, "tool_calls" if calls else "stop")


def _as_openai(message: ChatMessage) -> JsonObject:
    if message.role == "tool":
        text = message.error.message if message.error else message.text
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, "name": message.function}
    called = [
        {"id": one.id, "function": {"name": one.function, "arguments": one.arguments}}
        for one in getattr(message, "tool_calls", None) or ()
    ]
    return {"role": message.role, "content": message.text, "tool_calls": called}
