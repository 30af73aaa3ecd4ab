"""The policy as the environment's `rollout` gets it: `endpoint.chat`, and an OpenAI-compatible address.

    async def rollout(self, case, endpoint):
        answer = await endpoint.chat([{"role": "user", "content": case["question"]}])

In a `def rollout`, `chat` returns the answer itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, zip_longest
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from pydantic import BaseModel, TypeAdapter

from aitrain.environment.completion_parser import ToolJson, clean, parse_call, short
from aitrain.environment.http_server import RefusedRequestError, http_server, with_token
from aitrain.environment.session import AssistantTurn, Message, wrong_type
from aitrain.environment.tools import shown_tool
from aitrain.errors import EpisodeTruncated

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


# -- reading requests


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str = ""


class _Function(BaseModel):
    name: str
    arguments: Any = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _ChatMessage(BaseModel):
    """A message in OpenAI's format, as far as it is understood; other fields are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def read(self, names: dict[str | None, str]) -> Message:
        """The message in the form of chat templates; `names` are the tools' names by the ids of the calls so far."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        read: Message = {"role": "system" if self.role == "developer" else self.role, "content": clean(text)}
        if self.role == "assistant" and self.tool_calls:
            names |= {call.id: call.function.name for call in self.tool_calls}
            read["tool_calls"] = [parse_call(call.function.model_dump()).as_message_part() for call in self.tool_calls]
        if self.role == "tool":
            name = names.get(self.tool_call_id, self.name or "")
            if not name and self.tool_call_id not in names:  # the name of a call that could not be read is empty
                raise ValueError("a tool's message has no tool_call_id of a call in the messages before it")
            read["name"] = name
        return read


_MESSAGES = TypeAdapter(list[_ChatMessage])


@dataclass(eq=False)
class ChatRequest:
    """One request for an answer of the policy, and the future that gets the answer. Messages are in the form of chat
    templates: content is text, arguments of tool calls are objects, and a tool's message has the tool's name."""

    messages: tuple[Message, ...]
    tools: tuple[ToolJson, ...] | None = None
    """None: those of the conversation so far."""
    is_trained: bool = True
    answer: Future[AssistantTurn] = field(default_factory=Future)

    @classmethod
    def of(cls, messages: Any, tools: Any = None, is_trained: bool = True) -> ChatRequest:
        """A request with these messages and tools: dicts, or objects of the openai package.

        Raises:
            RefusedRequestError: they are not in OpenAI's format.
        """
        names, schemas = dict[str | None, str](), None
        try:
            given = _MESSAGES.validate_python(list(messages), from_attributes=True)
            read = tuple(message.read(names) for message in given)
            if not read or read[-1]["role"] == "assistant":
                raise ValueError("the last message must be one that the policy is to answer")
            if tools is not None:
                dumped = (tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True) for tool in tools)
                schemas = tuple(shown_tool(tool).schema for tool in dumped)
        except Exception as error:
            raise RefusedRequestError(400, f"messages or tools: {short(str(error), 300)}") from None
        return cls(read, schemas, is_trained)


# -- the conversation that is trained


def new_messages(before: Sequence[Message], tools: Sequence[ToolJson], request: ChatRequest) -> tuple[Message, ...]:
    """The messages of a request that follow a conversation. Tokens are only appended to it, so each request has to
    begin with the messages of the one before and the policy's answer.

    Raises:
        CallFailed: the request does not continue the conversation.
    """
    problem = "" if request.tools in (None, tools) else "changed the tools"
    pairs = zip_longest(before, request.messages[: len(before)], fillvalue=Message())
    for number, (was, now) in enumerate(pairs):
        if not problem and _comparable(was) != _comparable(now):
            problem = f"rewrote messages[{number}]: it was {short(str(was), 100)}, now {short(str(now), 100)}"
    if problem:
        raise wrong_type(
            f"{problem}\nThe trained conversation only grows: each request begins with the messages of the one"
            " before and the policy's answer.\nAnother conversation is asked for with trained=False (by HTTP: the"
            " model endpoint.untrained_model)."
        )
    return request.messages[len(before) :]


def _comparable(message: Message) -> tuple[object, ...]:
    """What makes two messages the same; clients strip and drop the rest."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message.get("role"), message.get("content", "").strip(), calls, message.get("name")


class EndpointServer:
    """An OpenAI-compatible server on 127.0.0.1 whose model is the policy: one for each process, with a path for each
    episode. `key` is what clients send as API key. Sampling settings of requests are not used."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.episodes = WeakValueDictionary[str, Endpoint]()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # all episodes of a batch may connect at once
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        run = http_server(with_token(self._answer, self.key)).run
        threading.Thread(target=run, args=([listener],), name="environment-endpoint", daemon=True).start()

    async def _answer(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        name, _, path = request.scope["path"].lstrip("/").partition("/")
        episode = self.episodes.get(name)
        if episode is None or request.method != "POST" or path != "v1/chat/completions":
            what = "the address of an episode is endpoint.base_url, until it is over, and takes /chat/completions only"
            raise RefusedRequestError(404, f"there is no {request.method} /{path}: {what}")
        body = await request.json()
        model = body.get("model")
        if model not in (Endpoint.model, Endpoint.untrained_model):
            what = f"there is no model {model}: use endpoint.model or endpoint.untrained_model"
            raise RefusedRequestError(404, what, "model_not_found")
        if body.get("n") not in (None, 1) or body.get("stream"):
            raise RefusedRequestError(400, "n must be 1, and stream false: an episode has one answer to each request")
        asked = ChatRequest.of(body.get("messages"), body.get("tools"), model == Endpoint.model)
        try:
            turn = await asyncio.wrap_future(episode.ask(asked))
        except EpisodeTruncated as error:
            # in the words by which clients know it
            raise RefusedRequestError(400, f"context length exceeded: {error}", "context_length_exceeded") from None
        usage = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.tokens}
        usage["total_tokens"] = sum(usage.values())
        end = "tool_calls" if turn.calls else "length" if turn.is_cut else "stop"
        choice = {"index": 0, "message": episode.message_of(turn), "finish_reason": end, "logprobs": None}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time())}
        return JSONResponse({**head, "model": model, "choices": [choice], "usage": usage})


_servers: dict[int, EndpointServer] = {}
"""The server of each process: a forked one has none of the threads of its parent."""
_lock = threading.Lock()


def endpoint_server() -> EndpointServer:
    """The server of this process, started when it is first needed."""
    with _lock:
        # clients ask 127.0.0.1 itself where the machine has an HTTP proxy, which would also get the key
        kept_out = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""  # of both, clients read the first
        if "127.0.0.1" not in kept_out:
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{kept_out},127.0.0.1".lstrip(",")
        if os.getpid() not in _servers:
            _servers[os.getpid()] = EndpointServer()
        return _servers[os.getpid()]


def running_address() -> object:
    """Host and port of the server of this process; None if there is none."""
    server = _servers.get(os.getpid())
    return server and server.address


class Endpoint:
    """The policy in a `rollout`, and its address for clients of OpenAI's API."""

    model = "policy"
    """Name of the policy, whose answers are trained."""
    untrained_model = "policy-untrained"
    """Name of the policy for other conversations, which are not trained."""

    def __init__(self, is_async: bool) -> None:
        self._is_async, self._path = is_async, secrets.token_hex(8)
        self._requests = SimpleQueue[ChatRequest | None]()
        self._is_closed = False
        self._answers = count(1)

    @cached_property
    def base_url(self) -> str:
        """Address of this episode: http://127.0.0.1:PORT/EPISODE/v1."""
        server = endpoint_server()
        server.episodes[self._path] = self
        return f"{server.url}/{self._path}/v1"

    @property
    def api_key(self) -> str:
        """The key that the address wants."""
        return endpoint_server().key

    def chat(self, messages: Iterable[object], tools: Iterable[object] | None = None, trained: bool = True) -> Any:
        """The policy's answer to the messages, as an OpenAI-style dict with `role`, `content` and perhaps `tool_calls`;
        in an `async def rollout` it is awaited.

        The trained conversation only grows: each request begins with the messages of the one before and the policy's
        answer. With `trained=False` it is another conversation, which is not trained.

        Raises:
            EpisodeTruncated: a limit has ended the episode.
            ValueError: messages or tools are not in OpenAI's format.
        """

        def ask() -> Future[AssistantTurn]:
            return self.ask(ChatRequest.of(messages, tools, trained))

        async def awaited() -> Message:
            return self.message_of(await asyncio.wrap_future(ask()))

        return awaited() if self._is_async else self.message_of(ask().result())

    # -- for its session, which takes the requests one by one, in the order in which they came, from any thread

    def ask(self, request: ChatRequest) -> Future[AssistantTurn]:
        """Put a request into the queue; the future gets the policy's answer, or the reason why there is none."""
        self._requests.put(request)
        if self._is_closed:
            self.close()
        return request.answer

    def message_of(self, turn: AssistantTurn) -> Message:
        """An answer in OpenAI's format; the names of its tool calls are unique in the episode."""
        message: Message = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
        number = next(self._answers)
        for place, call in enumerate(turn.calls):
            # arguments that cannot be read are no JSON here either, as from any server
            is_read = call.arguments is not None
            arguments = json.dumps(call.arguments, ensure_ascii=False) if is_read else call.problem
            function = {"name": call.name, "arguments": arguments}
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": f"call_{number}_{place}", "type": "function", "function": function})
        return message

    def take(self, seconds: float) -> list[ChatRequest | None]:
        """Wait for the next request; None if there are no more, and an empty list if none comes in this time."""
        with suppress(Empty):
            while (request := self._requests.get(timeout=seconds)) is not None:
                if request.answer.set_running_or_notify_cancel():
                    return [request]
            self.close()
            return [None]
        return []

    def close(self) -> None:
        """Refuse the requests that wait, and all later ones."""
        self._is_closed = True  # before what waits is refused: `ask` looks after it has put a request
        with suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if request is not None and request.answer.set_running_or_notify_cancel():
                    over = "the episode is over: the policy does not answer any more"
                    request.answer.set_exception(RefusedRequestError(410, over, "episode_over"))
        self._requests.put(None)
