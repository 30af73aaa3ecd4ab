"""The policy as the environment's `rollout` gets it: `endpoint.chat`, and an OpenAI-compatible address.

    async def rollout(self, case, endpoint):
        answer = await endpoint.chat([{"role": "user", "content": case["question"]}])

In a `def rollout`, `chat` returns the answer itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from aitrain.environment.chat_request import ChatAnswer, ChatRequest, EpisodeFailedError, read_request
from aitrain.environment.endpoint_server import EndpointServer, endpoint_server
from aitrain.environment.session import Message
from aitrain.execution.async_calls import is_on_shared_loop

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
