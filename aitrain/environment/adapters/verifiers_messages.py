"""Messages of verifiers 0.3: to the policy and back, and for reward functions."""

from __future__ import annotations

import time
from collections.abc import Mapping

from aitrain.environment.adapters.verifiers_settings import Foreign
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.session import Message
from aitrain.errors import EpisodeTruncated


def as_openai(message: Foreign) -> Message:
    """A message, a dict or an object of verifiers, in OpenAI's format."""
    given = dict(message) if isinstance(message, Mapping) else message.model_dump()
    plain = {key: value for key, value in given.items() if value is not None}
    calls = [call if isinstance(call, Mapping) else call.model_dump() for call in plain.pop("tool_calls", None) or ()]
    if calls:
        plain["tool_calls"] = [call if "function" in call else _as_call(call) for call in calls]
    return {**plain, "role": "user" if plain["role"] == "text" else plain["role"], "content": plain.get("content", "")}


def _as_call(call: Mapping[str, object]) -> Message:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def endpoint_client(endpoint: Endpoint) -> Foreign:
    """A model client of verifiers whose answers are the policy's."""
    from verifiers import OverlongPromptError
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage

    async def get_response(
        self: Foreign, prompt: Foreign, model: str, sampling_args: Foreign, tools: Foreign = None, **_: Foreign
    ) -> Foreign:
        schemas = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools or ()]
        try:
            answer = await endpoint.answer([as_openai(message) for message in prompt], schemas)
        except EpisodeTruncated as error:
            raise OverlongPromptError(str(error)) from error
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in answer.message.get("tool_calls", ())
        ]
        is_cut = answer.finish_reason == "length"
        message = ResponseMessage(
            content=answer.message["content"], tool_calls=calls or None, is_truncated=is_cut,
            finish_reason=answer.finish_reason,
        )  # fmt: skip
        used = answer.usage
        usage = used and Usage(
            prompt_tokens=used.prompt, reasoning_tokens=0, completion_tokens=used.completion,
            total_tokens=used.prompt + used.completion,
        )  # fmt: skip
        return Response(id="0", created=int(time.time()), model=model, usage=usage, message=message)

    rest = dict.fromkeys(Client.__abstractmethods__, _not_used)
    return type("EndpointClient", (Client,), {**rest, "get_response": get_response})(None)


async def _not_used(*_: Foreign) -> None:
    """The client asks the policy itself, without a server's format."""


class ScorerMessage(Message):
    """A message that is a dict in OpenAI's format and an object of verifiers' class: reward functions were written for
    the one or for the other."""

    def __init__(self, message: Foreign) -> None:
        super().__init__(as_openai(message))
        self._message = message

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._message)

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._message, name)


def for_scorers(given: Mapping[str, object]) -> Message:
    """The arguments of a reward function, with messages that are dicts and objects."""
    return {
        name: [ScorerMessage(message) for message in value]
        if name in ("prompt", "completion") and isinstance(value, list)
        else value
        for name, value in given.items()
    }
