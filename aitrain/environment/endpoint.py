"""The policy as the environment's `rollout` gets it: `endpoint.chat`, and an OpenAI-compatible address.

    async def rollout(self, case, endpoint):
        answer = await endpoint.chat([{"role": "user", "content": case["question"]}])

In a `def rollout`, `chat` returns the answer itself.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import os
import queue
import re
import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, TypeAlias

from aitrain.environment.session import AssistantTurn, Message, TokenUsage
from aitrain.environment.tool_call_parser import ToolJson, clean, short
from aitrain.environment.tools import InvalidToolError, function_part, shown_tool
from aitrain.errors import AitrainError, EpisodeTruncated
from aitrain.execution.async_calls import is_on_shared_loop
from aitrain.execution.user_code import describe_error

ROLES = ("system", "user", "assistant", "tool")


class EpisodeFailedError(AitrainError):
    """The policy does not answer a request; the text is the reason, and `code` is for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidChatRequestError(AitrainError, ValueError):
    """A request that is not in OpenAI's format; `param` is its part that is wrong."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ChatRequest:
    """One request for an answer of the policy. Messages are in the form of chat templates: content is text, arguments
    of tool calls are objects, and a tool's message has the tool's name."""

    messages: tuple[Message, ...]
    tools: tuple[ToolJson, ...] | None = None
    """None: those of the conversation so far."""
    is_trained: bool = True
    ignored: tuple[str, ...] = ()
    """Names of settings that were given and are not used."""


@dataclass(frozen=True)
class ChatAnswer:
    """The policy's answer to a request: an assistant message in OpenAI's format."""

    message: Message
    usage: TokenUsage | None = None

    @classmethod
    def of(cls, turn: AssistantTurn, number: int) -> ChatAnswer:
        """The answer of a turn, the `number`th of its episode."""
        if not turn.calls:
            return cls({"role": "assistant", "content": turn.text}, turn.usage)
        calls = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                # arguments that cannot be read are no JSON here either, as from any server
                "function": {"name": call.name, "arguments": _arguments_text(call.arguments, call.problem)},
            }
            for place, call in enumerate(turn.calls)
        ]
        return cls({"role": "assistant", "content": turn.text or None, "tool_calls": calls}, turn.usage)

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.message.get("tool_calls"):
            return "tool_calls"
        return "length" if self.usage is not None and self.usage.is_cut else "stop"


def _arguments_text(arguments: ToolJson | None, problem: str) -> str:
    return problem if arguments is None else json.dumps(arguments, ensure_ascii=False)


# -- reading requests


def read_request(messages: object, tools: object = None, is_trained: bool = True) -> ChatRequest:
    """A request with these messages and tools: dicts, or objects of the openai package.

    Raises:
        InvalidChatRequestError: they are not in OpenAI's format.
    """
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise InvalidChatRequestError(f"messages is {type(messages).__name__}: give a list of messages")
    names: dict[str, str] = {}
    read = tuple(_read_message(f"messages[{number}]", each, names) for number, each in enumerate(messages))
    if not read:
        raise InvalidChatRequestError("messages is empty")
    if read[-1]["role"] == "assistant":
        raise InvalidChatRequestError("the last message is the assistant's: end with one that the policy is to answer")
    return ChatRequest(read, _read_tools(tools), is_trained)


def _read_message(place: str, given: object, names: dict[str, str]) -> Message:
    """One message; `names` are the tools' names by the ids of the calls so far."""
    message = _as_dict(given)
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise InvalidChatRequestError(f"{place} has the role {role!r}: use one of {', '.join(ROLES)}")
    read: Message = {"role": role, "content": _text(place, message.get("content"))}
    if role == "assistant" and message.get("tool_calls"):
        calls = [_as_dict(call) for call in message["tool_calls"]]
        read["tool_calls"] = [_read_call(f"{place}.tool_calls", call, names) for call in calls]
    if role == "tool":
        name = names.get(str(message.get("tool_call_id")), message.get("name"))
        if not isinstance(name, str):
            raise InvalidChatRequestError(f"{place} has no tool_call_id of a call in the messages before it")
        read["name"] = name
    return read


def _as_dict(given: object) -> Message:
    if isinstance(given, Mapping):
        return dict(given)
    dump = getattr(given, "model_dump", None)
    dumped = dump(exclude_none=True) if callable(dump) else None
    if not isinstance(dumped, dict):
        raise InvalidChatRequestError(f'{short(repr(given))} is not a message: use {{"role": ..., "content": ...}}')
    return dumped


def _text(place: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return clean(content or "")
    parts = [_as_dict(part) for part in content] if isinstance(content, Iterable) else []
    kinds = {str(part.get("type")) for part in parts} - {"text"}
    if kinds or not isinstance(content, Iterable):
        what = ", ".join(sorted(kinds)) or type(content).__name__
        raise InvalidChatRequestError(f"{place} has content of the type {what}: only text is understood")
    return clean("".join(str(part.get("text", "")) for part in parts))


def _read_call(place: str, call: Message, names: dict[str, str]) -> Message:
    function = _as_dict(call.get("function") or {})
    name, written = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise InvalidChatRequestError(f"{place} has a call without the function's name")
    names[str(call.get("id"))] = name
    try:
        arguments = json.loads(written) if isinstance(written, str) else written
    except ValueError:
        arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tools(tools: object) -> tuple[ToolJson, ...] | None:
    if tools is None:
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Iterable):
        raise InvalidChatRequestError(f"tools is {type(tools).__name__}: give a list of schemas", "tools")
    try:
        return tuple(shown_tool(_as_dict(tool)).schema for tool in tools)
    except InvalidToolError as error:
        raise InvalidChatRequestError(f"tools: {' '.join(str(error).split())}", "tools") from None


# -- the conversation that is trained


@dataclass
class TrainedConversation:
    """The conversation of one episode that is trained. Tokens are only appended to it, so each request has to begin
    with the messages of the one before and the policy's answer."""

    messages: list[Message] = field(default_factory=list)
    tools: tuple[ToolJson, ...] = ()

    def begin(self, request: ChatRequest) -> None:
        """Begin with the first request."""
        self.messages, self.tools = list(request.messages), request.tools or ()

    def add_answer(self, answer: ChatAnswer) -> None:
        """Add the policy's answer."""
        self.messages.append(_read_message("answer", answer.message, {}))

    def append(self, request: ChatRequest) -> tuple[Message, ...]:
        """The messages of a request that follow the policy's last answer.

        Raises:
            EpisodeFailedError: the request does not continue the conversation.
        """
        problem = self._problem(request)
        if problem:
            raise EpisodeFailedError(
                f"{problem}\nThe trained conversation only grows: each request begins with the messages of the one"
                " before and the policy's answer.\nAnother conversation is asked for with trained=False (by HTTP: the"
                " model endpoint.untrained_model).",
                "conversation_rewritten",
            )
        new = request.messages[len(self.messages) :]
        self.messages += new
        return new

    def _problem(self, request: ChatRequest) -> str:
        if request.tools is not None and request.tools != self.tools:
            return f"changed the tools: they were {_names(self.tools)}, now {_names(request.tools)}"
        known = len(self.messages)
        for number, (was, now) in enumerate(zip(self.messages, request.messages, strict=False)):
            if _comparable(was) != _comparable(now):
                whose = "the policy's answer" if was["role"] == "assistant" else f"role {was['role']}"
                return f"rewrote messages[{number}] ({whose}): it was {_shown(was)}, now {_shown(now)}"
        if len(request.messages) == known - 1:
            return "asked for a second answer to the same messages, without the policy's first (a retry, perhaps?)"
        if len(request.messages) <= known:
            return f"left out messages: {known} were said so far, and the request has {len(request.messages)}"
        return ""


def _comparable(message: Message) -> object:
    """What makes two messages the same; clients strip and drop the rest."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls, message.get("name")


def _shown(message: Message) -> str:
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    called = f" with calls of {', '.join(calls)}" if calls else ""
    return f"{short(repr(message['content']))}{called}"


def _names(tools: Sequence[ToolJson]) -> str:
    return ", ".join(str(function_part(tool).get("name")) for tool in tools) or "none"


JsonObject: TypeAlias = "dict[str, Any]"

MODELS = ("policy", "policy-untrained")
MAX_BODY = 32 << 20
"""Maximum bytes of a request."""
IDLE = 120.0
"""Seconds after which a connection without a request is closed."""
BLOCKED = 2.0
"""Seconds without progress after which a rollout is taken to block the event loop."""

_USED = {"model", "messages", "tools", "stream", "stream_options", "n"}
_HARMLESS = {"user", "metadata", "store", "parallel_tool_calls", "service_tier"}
_BLOCKS_LOOP = (
    "the rollout is `async def` and waits for the policy with a client that is not async, which blocks every other"
    " episode: use AsyncOpenAI or httpx.AsyncClient, or write `def rollout`"
)


class ServedEpisode(Protocol):
    """The episode behind a path: its requests, see endpoint.py: RequestQueue."""

    blocks_loop: Callable[[float], bool]

    def ask(self, request: ChatRequest) -> Future[ChatAnswer]: ...


class _HttpError(Exception):
    """A request that is refused, with the fields of OpenAI's errors."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class EndpointServer(ThreadingHTTPServer):
    """The server of one process; `key` is what clients send as API key."""

    daemon_threads = True
    request_queue_size = 1024  # all episodes of a batch may connect at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = secrets.token_urlsafe(24)
        self.episodes: dict[str, ServedEpisode] = {}
        threading.Thread(target=self.serve_forever, name="environment-endpoint", daemon=True).start()

    def server_bind(self) -> None:
        """Bind the socket, without the look-up of a host name that HTTPServer makes."""
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, episode: ServedEpisode) -> str:
        """Serve an episode; returns its path."""
        path = secrets.token_hex(8)
        self.episodes[path] = episode
        return path

    def remove(self, path: str) -> None:
        """Serve an episode no longer."""
        self.episodes.pop(path, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a client that has gone away is no error of ours."""


@functools.cache
def _server() -> EndpointServer:
    return EndpointServer()


_lock = threading.Lock()


def endpoint_server() -> EndpointServer:
    """The server of this process, started when it is first needed."""
    with _lock:
        _bypass_proxies()
        return _server()


def _bypass_proxies() -> None:
    """Let clients ask 127.0.0.1 itself where the machine has an HTTP proxy, which would also get the key."""
    kept_out = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if any(name.lower() in ("http_proxy", "all_proxy") for name in os.environ) and "127.0.0.1" not in kept_out:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{kept_out},127.0.0.1".lstrip(",")


def running_address() -> object:
    """Host and port of the server of this process; None if there is none."""
    return _server().server_address if _server.cache_info().currsize else None


def _forget_server() -> None:
    """Reset the server in a forked process, which has none of its threads."""
    global _lock
    _lock = threading.Lock()
    _server.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: EndpointServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, *_: object) -> None:
        """Do nothing: a line for each request would fill the log."""

    def _answer(self, answer: Callable[[ServedEpisode, str], tuple[str, bytes]]) -> None:
        try:
            episode, path = self._episode()
        except _HttpError as error:
            self._skip_body()
            self._send_problem(error)
            return
        try:
            kind, body = answer(episode, path)
        except _HttpError as error:
            self._send_problem(error)
        except Exception as error:  # a client that is not answered asks again
            what = f"the request cannot be read: {describe_error(error)}"
            self._send_problem(_HttpError(HTTPStatus.BAD_REQUEST, what))
        else:
            self._send(HTTPStatus.OK, kind, body)

    def _episode(self) -> tuple[ServedEpisode, str]:
        """The episode of the path, and the rest of the path.

        Raises:
            _HttpError: the key is wrong, or there is no such episode.
        """
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(key, self.server.key.encode()):
            raise _HttpError(HTTPStatus.UNAUTHORIZED, "wrong API key: use endpoint.api_key", "invalid_api_key")
        name, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        episode = self.server.episodes.get(name)
        if episode is None:
            raise _HttpError(
                HTTPStatus.NOT_FOUND, "no such episode, or it is over: use endpoint.base_url", "episode_over"
            )
        return episode, rest

    def _get(self, _: ServedEpisode, path: str) -> tuple[str, bytes]:
        models = [{"id": model, "object": "model", "created": 0, "owned_by": "aitrain"} for model in MODELS]
        if path == "v1/models":
            return _json({"object": "list", "data": models})
        for model in models:
            if path == f"v1/models/{model['id']}":
                return _json(model)
        raise self._no_such_path()

    def _post(self, episode: ServedEpisode, path: str) -> tuple[str, bytes]:
        body = self._body()  # also of a wrong path, as the next request follows it
        if path != "v1/chat/completions":
            raise self._no_such_path()
        request = _chat_request(body)
        try:
            answer = _wait_for(episode, episode.ask(request))
        except EpisodeTruncated as error:
            raise _HttpError(HTTPStatus.BAD_REQUEST, str(error), "context_length_exceeded", "messages") from None
        except EpisodeFailedError as error:
            status = HTTPStatus.GONE if error.code == "episode_over" else HTTPStatus.BAD_REQUEST
            raise _HttpError(status, str(error), error.code) from None
        except AitrainError as error:
            raise _HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None
        if body.get("stream"):
            return "text/event-stream", _streamed(body, answer)
        message = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
        return _json({**_head(body, "chat.completion"), "choices": [message], **_usage(answer)})

    def _body(self) -> JsonObject:
        length = self._length()
        if length is None:
            self.close_connection = True  # where the body ends is not known
            raise _HttpError(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        if length > MAX_BODY:
            self._skip_body()
            raise _HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError) as error:
            raise _HttpError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise _HttpError(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        return body

    def _length(self) -> int | None:
        """Bytes of the body; None if that is not known."""
        given = self.headers.get("Content-Length", "")
        return int(given) if re.fullmatch("[0-9]{1,18}", given) else None

    def _skip_body(self) -> None:
        """Read the body of a request that is refused, as the next request follows it."""
        length = self._length()
        self.close_connection |= length is None and self.command != "GET"
        while length and (part := self.rfile.read(min(length, 1 << 20))):
            length -= len(part)

    def _no_such_path(self) -> _HttpError:
        what = f"there is no {self.command} {self.path}: only /v1/chat/completions and /v1/models"
        return _HttpError(HTTPStatus.NOT_FOUND, what)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that http.server itself refuses, such as one with an unknown method."""
        self.close_connection = True
        self._send_problem(_HttpError(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def _send_problem(self, error: _HttpError) -> None:
        kind = "authentication_error" if error.status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
        problem = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        self._send(error.status, *_json({"error": problem}))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:  # the client has gone away
            self.close_connection = True


def _chat_request(body: JsonObject) -> ChatRequest:
    """The request in a body.

    Raises:
        _HttpError: it is not in OpenAI's format, or asks for what cannot be had.
    """
    model = body.get("model")
    if model not in MODELS:
        what = f"there is no model {model}: use endpoint.model or endpoint.untrained_model"
        raise _HttpError(HTTPStatus.NOT_FOUND, what, "model_not_found", "model")
    if body.get("n") not in (None, 1):
        raise _HttpError(HTTPStatus.BAD_REQUEST, "n must be 1: an episode has one answer to each request", None, "n")
    try:
        request = read_request(body.get("messages"), body.get("tools"), model == MODELS[0])
    except InvalidChatRequestError as error:
        raise _HttpError(HTTPStatus.BAD_REQUEST, str(error), None, error.param) from None
    rest = {name: value for name, value in body.items() if name not in _USED | _HARMLESS}
    asks = (name for name, value in rest.items() if value is not None and value != "auto" and value is not False)
    return replace(request, ignored=tuple(sorted(asks)))


def _wait_for(episode: ServedEpisode, answer: Future[ChatAnswer]) -> ChatAnswer:
    """Wait for the policy's answer; other episodes may have to wait for the event loop, which must be free."""
    try:
        return answer.result(BLOCKED)
    except TimeoutError:
        if not answer.done() and episode.blocks_loop(BLOCKED):
            raise EpisodeFailedError(_BLOCKS_LOOP, "blocks_event_loop") from None
    return answer.result()


def _json(value: object) -> tuple[str, bytes]:
    return "application/json", json.dumps(value).encode()


def _head(body: JsonObject, kind: str) -> JsonObject:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": body["model"]}


def _usage(answer: ChatAnswer) -> JsonObject:
    if answer.usage is None:
        return {}
    prompt, completion = answer.usage.prompt, answer.usage.completion
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"usage": usage}


def _streamed(body: JsonObject, answer: ChatAnswer) -> bytes:
    """The answer as server-sent events: it is complete before the first one, so there are few."""
    message = dict(answer.message)
    if message.get("tool_calls"):
        message["tool_calls"] = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
    head = _head(body, "chat.completion.chunk")
    parts: list[tuple[JsonObject, str | None]] = [(message, None), ({}, answer.finish_reason)]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in parts]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], **_usage(answer)})
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


MAX_REFUSALS = 100
"""Requests after the end of an episode that are refused; later ones wait for ever, so that a loop that catches
everything does not spin."""


@dataclass(frozen=True)
class PendingRequest:
    """A request, and the future that gets its answer."""

    request: ChatRequest
    answer: Future[ChatAnswer] = field(default_factory=Future)


class RequestQueue:
    """The requests of one rollout in the order in which they came, from any thread; its session takes them one by one.

    `blocks_loop` tells whether the rollout keeps the event loop busy for some seconds.
    """

    def __init__(self) -> None:
        self.blocks_loop: Callable[[float], bool] = lambda _: False
        self._requests: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._refusals = 0
        self._is_closed = False

    def ask(self, request: ChatRequest) -> Future[ChatAnswer]:
        """Put a request into the queue; the future gets the policy's answer, or the reason why there is none."""
        pending = PendingRequest(request)
        with self._lock:
            if not self._is_closed:
                self._requests.put(pending)
                return pending.answer
            self._refusals += 1
            is_refused = self._refusals <= MAX_REFUSALS
        if is_refused:
            pending.answer.set_exception(_over())
        return pending.answer

    def take(self) -> PendingRequest | None:
        """Wait for the next request; None: the rollout has ended."""
        while (pending := self._requests.get()) is not None:
            if pending.answer.set_running_or_notify_cancel():
                return pending
        return None

    def end(self) -> None:
        """Note that the rollout has ended."""
        self.close()
        self._requests.put(None)

    def close(self) -> None:
        """Refuse the requests that wait, and all later ones."""
        with self._lock:
            self._is_closed = True
        with suppress(queue.Empty):
            while (pending := self._requests.get_nowait()) is not None:
                if pending.answer.set_running_or_notify_cancel():
                    pending.answer.set_exception(_over())
            self._requests.put(None)  # it was the note of the end


def _over() -> EpisodeFailedError:
    return EpisodeFailedError("the episode is over: the policy does not answer any more", "episode_over")


class _Address:
    """The part that both kinds of endpoints share: an address for clients of OpenAI's API."""

    model = "policy"
    """Name of the policy, whose answers are trained."""
    untrained_model = "policy-untrained"
    """Name of the policy for other conversations, which are not trained."""

    def __init__(self, requests: RequestQueue) -> None:
        self._requests = requests

    @cached_property
    def _server(self) -> EndpointServer:
        return endpoint_server()

    @cached_property
    def _path(self) -> str:
        return self._server.add(self._requests)

    @property
    def base_url(self) -> str:
        """Address of this episode for clients of OpenAI's API: http://127.0.0.1:PORT/EPISODE/v1."""
        return f"{self._server.url}/{self._path}/v1"

    @property
    def api_key(self) -> str:
        """The key that the address wants."""
        return self._server.key

    def close(self) -> None:
        """Forget the address of this episode."""
        if "_path" in self.__dict__:
            self._server.remove(self._path)

    def _ask(self, messages: Iterable[object], tools: Iterable[object] | None, trained: bool) -> Future[ChatAnswer]:
        return self._requests.ask(read_request(messages, tools, trained))


class Endpoint(_Address):
    """The policy in an `async def rollout`."""

    async def chat(
        self, messages: Iterable[object], tools: Iterable[object] | None = None, trained: bool = True
    ) -> Message:
        """The policy's answer to the messages, as an OpenAI-style dict with `role`, `content` and perhaps `tool_calls`.

        The trained conversation only grows: each request begins with the messages of the one before and the policy's
        answer. With `trained=False` it is another conversation, which is not trained.

        Raises:
            EpisodeTruncated: a limit has ended the episode.
            ValueError: messages or tools are not in OpenAI's format.
        """
        return (await self.answer(messages, tools, trained)).message

    async def answer(
        self, messages: Iterable[object], tools: Iterable[object] | None = None, trained: bool = True
    ) -> ChatAnswer:
        """The same with the number of tokens and the reason for the end."""
        return await asyncio.wrap_future(self._ask(messages, tools, trained))


class BlockingEndpoint(_Address):
    """The policy in a `def rollout`, which runs in a thread of its own."""

    def chat(self, messages: Iterable[object], tools: Iterable[object] | None = None, trained: bool = True) -> Message:
        """The same as `Endpoint.chat`, without await.

        Raises:
            RuntimeError: it is called on the event loop that all episodes share, and would block it.
        """
        if is_on_shared_loop():
            raise RuntimeError(
                "endpoint.chat blocks every episode here: write `async def rollout`, where it is awaited"
            )
        return self._ask(messages, tools, trained).result().message
