"""An OpenAI-compatible address as an engine: messages in, one message out.

The key comes from OPENAI_API_KEY only. Requests that the server is too busy for, or fails on, are repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, Field, ValidationError

from aitrain import activity
from aitrain.engines.sampling import Sampling
from aitrain.environment.completion_parser import THINK, THOUGHT_KEYS
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, RunFailed
from aitrain.redaction import redact
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave, RolloutClock
from aitrain.rollout.message_format import MessageFormat
from aitrain.rollout.thinking import VARIABLES
from aitrain.vllm.client import error_text

KEY = "OPENAI_API_KEY"
ATTEMPTS = 6
"""Attempts of one request; with the pauses between them, about a minute."""
FIRST_PAUSE = 1.0
"""Seconds to wait before a request is repeated; doubled each time."""
DEADLINE, CONNECT_SECONDS, LIST_SECONDS = 600.0, 10.0, 30.0
"""Seconds to wait for an answer, a connection, and the list of models."""
BUSY = {408, 409, 425, 429}
"""Statuses below 500 that pass."""
DENIED = {401, 403}
"""Statuses of a missing or wrong key."""
OTHER_LIMIT = "max_completion_tokens"
"""What OpenAI's newer models take instead of max_tokens, which they refuse."""


@dataclass
class ChatEndpoint:
    """Samples by /chat/completions; every request is independent."""

    url: str
    model: str
    chat: MessageFormat
    sampling: Sampling
    concurrency: int = 16
    """Requests at a time."""
    transport: httpx.AsyncBaseTransport | None = None
    pause: float = FIRST_PAUSE
    clock: RolloutClock = field(default_factory=RolloutClock)
    _limit_name: str = field(default="max_tokens", init=False)

    def __post_init__(self) -> None:
        self._http, self._slots = endpoint_client(self.url, self.transport), asyncio.Semaphore(self.concurrency)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one message.

        Raises:
            RunFailed: the server refuses the request, or fails it ATTEMPTS times.
        """
        messages, tools = self.chat.conversation(request.prompt_ids)
        body = {"model": self.model, "messages": _to_wire(messages), **self._settings(request)}
        if tools:
            body["tools"] = tools
        async with self._slots:
            with self.clock.running("generate"):
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
        return Completion(ids, None, "length" if is_cut else "stop")

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """Context of episodes that are played together; no-op, as requests are independent of each other."""
        with activity.own.waiting("waiting for answers", DEADLINE):
            yield lambda: None

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _settings(self, request: GenerationRequest) -> dict[str, Any]:
        """The fields of the sampling; those that only some servers know are sent only where they change something."""
        is_greedy, usual = request.decoding is Decoding.GREEDY, Sampling()
        sampling = self.sampling.greedy if is_greedy else self.sampling
        settings: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        for name in ("top_k", "stop"):
            if getattr(sampling, name) != getattr(usual, name):
                settings[name] = getattr(sampling, name)
        if self.chat.thinking in ("on", "off"):
            settings["chat_template_kwargs"] = VARIABLES[self.chat.thinking]
        elif self.chat.thinking is not None:
            settings["reasoning_effort"] = self.chat.thinking
        if request.seed is not None and not is_greedy:
            settings["seed"] = request.seed.request_seed % 2**31
        return settings

    async def _post(self, body: dict[str, Any], max_tokens: int) -> _ChatCompletion:
        pause = self.pause
        for _ in range(ATTEMPTS):
            sent = {**body, self._limit_name: max_tokens}
            try:
                async with asyncio.timeout(DEADLINE):  # httpx's own holds for each piece of an answer
                    response = await self._http.post(f"{self.url}/chat/completions", json=sent)
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
                problem = redact(f"{type(error).__name__}: {error}")
            else:
                if response.is_success:
                    return self._parsed(response)
                problem = f"{response.status_code}: {redact(error_text(response))}"
                if OTHER_LIMIT in problem and OTHER_LIMIT not in sent:
                    self._limit_name = OTHER_LIMIT
                    continue
                if response.status_code < 500 and response.status_code not in BUSY:
                    raise RunFailed(_refused(self.url, response))
            await asyncio.sleep(pause)
            pause *= 2
        raise RunFailed(
            f"{self.url} failed {ATTEMPTS} times at the same request: {problem}\n"
            "What was scored is saved; --resume continues when the server is back."
        )

    def _parsed(self, response: httpx.Response) -> _ChatCompletion:
        try:
            return _ChatCompletion.model_validate_json(response.content)
        except ValidationError:
            raise RunFailed(
                f"{self.url} gave no chat completion: {redact(' '.join(response.text[:200].split()))}\n"
                "Is it OpenAI-compatible? Such an address often ends in /v1."
            ) from None


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


def endpoint_client(url: str, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """An HTTP client with the key of the environment.

    Raises:
        ConfigError: the key cannot be sent.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"The environment variable {KEY} has characters that no key can have.\nSet it again.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(DEADLINE, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(headers=headers, timeout=timeout, transport=transport, limits=limits)


async def served_model(url: str, wanted: str | None, transport: httpx.AsyncBaseTransport | None = None) -> str:
    """The name of the model at an address: the given one, or the only one that it lists.

    Raises:
        ConfigError: it does not answer, wants another key, or lists several models.
    """
    if wanted is not None:
        return wanted
    async with endpoint_client(url, transport) as client:
        try:
            response = await client.get(f"{url}/models", timeout=LIST_SECONDS)
            names = [str(card["id"]) for card in response.json()["data"]] if response.is_success else []
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"model: {url} does not list its models ({type(error).__name__})\n"
                "Is the server running? The address of vLLM ends in /v1."
            ) from None
    if response.status_code in DENIED:
        raise ConfigError(_refused(url, response))
    if len(names) != 1:
        known = redact(", ".join(names[:5])) or f"none (status {response.status_code})"
        raise ConfigError(f"model_name: name the model at {url} with --model-name: {url}/models lists {known}")
    return names[0]


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


def _refused(url: str, response: httpx.Response) -> str:
    advice = "Check the address, which often ends in /v1, --model-name, and what the message says."
    if response.status_code in DENIED:
        advice = f"Put a key that may use the model into the environment variable {KEY}."
    return f"{url} refuses the request: {response.status_code}: {redact(error_text(response))}\n{advice}"
