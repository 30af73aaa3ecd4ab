"""An OpenAI-compatible server on 127.0.0.1 whose model is the policy: one for each process, with a path for each
episode."""

from __future__ import annotations

import functools
import hmac
import json
import os
import re
import secrets
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, TypeAlias

from aitrain.environment.chat_request import (
    ChatAnswer,
    ChatRequest,
    EpisodeFailedError,
    InvalidChatRequestError,
    read_request,
)
from aitrain.errors import AitrainError, EpisodeTruncated
from aitrain.execution.user_code import describe_error

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
