"""An OpenAI-compatible address as an engine: messages in, one message out.

The key comes from OPENAI_API_KEY only. Requests that the server is too busy for, or fails on, are repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from aitrain import activity
from aitrain.engines.sampling import Sampling
from aitrain.environment.completion_parser import THINK, THOUGHT_KEYS
from aitrain.environment.judges.model_judge import JudgeServer
from aitrain.environment.session import Message
from aitrain.errors import RunFailed
from aitrain.execution.failure import CallFailed
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest
from aitrain.rollout.message_format import END, MessageFormat
from aitrain.rollout.thinking import VARIABLES

RETRIES = 7
"""How often a request is repeated; with the pauses between them, for about a minute."""
DEADLINE = 600.0
"""Seconds to wait for an answer."""
OTHER_LIMIT = "max_completion_tokens"
"""What OpenAI's newer models take instead of max_tokens, which they refuse."""


@dataclass
class ChatEndpoint(Engine):
    """Samples by /chat/completions; every request is independent."""

    url: str
    model: str
    chat: MessageFormat
    sampling: Sampling
    concurrency: int = 16
    """Requests at a time."""
    end = END
    _limit_name: str = field(default="max_tokens", init=False)

    def __post_init__(self) -> None:  # judges ask their servers in the same way
        self._server = JudgeServer(url=self.url, timeout=DEADLINE, retries=RETRIES, concurrency=self.concurrency)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one message.

        Raises:
            RunFailed: the server refuses the request, or fails it again and again.
        """
        messages, tools = self.chat.conversation(request.prompt_ids)
        body = {"model": self.model, "messages": _to_wire(messages), **self._settings(request)}
        if tools:
            body["tools"] = tools
        with self.clock.running("generate"), activity.own.waiting("waiting for answers", DEADLINE):
            answer = await self._post(body, request.max_tokens)
        choice, tokens = answer.choices[0], max(1, answer.usage.completion_tokens)
        content, thought = choice.message.content or "", choice.message.reasoning_content or choice.message.reasoning
        if self.chat.thinking not in (None, "off") and not thought:  # a server without a parser of thoughts
            thought, rest = THINK.split(content)
            content = rest or ""
        message: Message = {"role": "assistant", "content": content}
        if thought:
            message[THOUGHT_KEYS[0]] = thought
        if choice.message.tool_calls:
            message["tool_calls"] = choice.message.tool_calls
        is_cut = choice.finish_reason == "length"
        ids = self.chat.completion_ids(message, min(tokens, request.max_tokens) if is_cut else tokens)
        activity.own.add_tokens(len(ids))
        return Completion(ids, None, is_cut)

    def _settings(self, request: GenerationRequest) -> dict[str, Any]:
        """The fields of the sampling; those that only some servers know are sent only where they change something."""
        is_greedy = request.decoding is Decoding.GREEDY
        sampling = self.sampling.greedy if is_greedy else self.sampling
        settings: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k:
            settings["top_k"] = sampling.top_k
        if sampling.stop:
            settings["stop"] = sampling.stop
        if self.chat.thinking in ("on", "off"):
            settings["chat_template_kwargs"] = VARIABLES[self.chat.thinking]
        elif self.chat.thinking is not None:
            settings["reasoning_effort"] = self.chat.thinking
        if not is_greedy:
            settings["seed"] = request.seed.request_seed % 2**31
        return settings

    async def _post(self, body: dict[str, Any], max_tokens: int) -> _ChatCompletion:
        sent = {**body, self._limit_name: max_tokens}
        try:
            answer = await self._server.post("/chat/completions", sent)
            return _ChatCompletion.model_validate(answer)
        except CallFailed as error:
            what = error.failure.message.removeprefix("the judge at ")
            if OTHER_LIMIT in what and OTHER_LIMIT not in sent:
                self._limit_name = OTHER_LIMIT
                return await self._post(body, max_tokens)
            advice = "Start the eval again when the server is back."
        except ValidationError:
            what = f"{self.url} gave no chat completion"
            advice = "Is it OpenAI-compatible? Such an address often ends in /v1."
        raise RunFailed(f"{what}\n{advice}")


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of the same."""
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    completion_tokens: int = 1


class _ChatCompletion(BaseModel):
    """What is read of a server's answer."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage = _Usage()
    """One token if the server does not count them."""


def _to_wire(messages: Sequence[Message]) -> list[Message]:
    """Messages in OpenAI's form: arguments as text, and an id that joins each call and its result."""
    sent: list[Message] = []
    ids: list[str] = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            calls: list[dict[str, Any]] = []
            for place, call in enumerate(message["tool_calls"]):
                function = dict(call["function"])
                if not isinstance(function.get("arguments"), str):
                    function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                id = call.get("id") or f"call_{number}_{place}"
                calls.append({"id": id, "type": "function", "function": function})
            ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            message = {"tool_call_id": ids.pop(0) if ids else "call", **message}
        sent.append(message)
    return sent
