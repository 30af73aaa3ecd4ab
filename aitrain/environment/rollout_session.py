"""The session of `rollout`: code of the environment that asks the policy itself, and is suspended while it waits."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from traceback import StackSummary
from typing import Any, TypeAlias

from aitrain.environment.completion_parser import ToolCall, ToolJson
from aitrain.environment.contract import (
    UNFINISHED,
    Case,
    ScoreResult,
    call_by_name,
    env_kind,
    parse_score,
    shown,
)
from aitrain.environment.endpoint import ChatRequest, Endpoint, RequestQueue, chat_answer, new_messages, read_message
from aitrain.environment.http_server import RefusedRequestError
from aitrain.environment.session import (
    AssistantTurn,
    EnvResponse,
    LocalSession,
    Message,
    ResetResult,
    Session,
    UntrainedChat,
    wrong_type,
)
from aitrain.errors import EpisodeTruncated
from aitrain.execution.deadline_pool import CANCELLED
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.task import Task, current_task, wait_until
from aitrain.execution.user_code import stack_of_thread

MAX_UNTRAINED = 1_000
"""Untrained requests of one episode, and those after its limit; with more, it fails, as nothing else ends a loop of
them."""

SECONDS_TO_END = 5.0
"""Time that a rollout has to end when its session is closed."""


class RolloutSession(LocalSession):
    """`rollout`: asks the policy through its endpoint, and returns the score. It runs in a thread for as long as the
    session; `async def` runs on the shared event loop."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._returned = Future[object]()
        self._task = Task(math.inf)
        self._thread: threading.Thread | None = None
        self._requests = RequestQueue()
        self._endpoint: Endpoint | None = None
        self._messages = list[Message]()
        """The conversation that is trained."""
        self._tools: tuple[ToolJson, ...] = ()
        self._pending: ChatRequest | None = None
        """The request that waits for the answer."""
        self._limit = ""
        self._answers = self._untrained = 0
        self._calls: tuple[ToolCall, ...] = ()
        """The tool calls of the last trained answer."""

    # -- the calls of an episode

    def open(self, arguments: Mapping[str, object]) -> ResetResult:
        """Start the rollout, and wait for its first request."""
        method = self.environment.rollout
        is_async = inspect.iscoroutinefunction(inspect.unwrap(method))
        self._endpoint = Endpoint(self._requests, is_async)
        call = partial(call_by_name, method, {**arguments, "endpoint": self._endpoint}, ["endpoint"])
        self._thread = threading.Thread(target=self._run, args=(call,), name="environment-rollout", daemon=True)
        self._thread.start()
        return self._begun(self._next())

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Hand the answer to the rollout, and wait for its next request, or its end."""
        self._answer(turn)
        request = self._next()
        if request is not None and not request.is_trained:
            return EnvResponse(untrained=_untrained(request))
        if not self._messages:
            return EnvResponse(reset=self._begun(request))
        calls, self._calls = self._calls, ()
        try:
            messages = () if request is None else new_messages(self._messages, self._tools, request)
        except RefusedRequestError as error:
            raise self._failed(error) from None
        self._messages += messages
        return EnvResponse(messages, request is None, len(calls), sum(bool(call.problem) for call in calls))

    def score(self, arguments: Mapping[str, object]) -> ScoreResult:
        """What the rollout returned. If a limit ended the episode, EpisodeTruncated is raised in the rollout, which may
        catch it and return a score; otherwise the episode is unfinished."""
        self._limit = self._limit or "a limit ended the episode"
        self._answer(AssistantTurn("", limit=self._limit))
        while self._next() is not None:
            self._answer(AssistantTurn("", limit=self._limit))
        is_scored = self._returned.exception() is None
        return parse_score(self._returned.result()) if is_scored else UNFINISHED

    def close(self) -> None:
        """End the rollout, also if `open` has not finished."""
        self._fail_pending(RefusedRequestError(410, "the episode is over", "episode_over"))
        self._requests.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._thread is not None and not self._returned.done():
            self._cancel(CANCELLED)
            wait([self._returned], SECONDS_TO_END)

    # -- the thread

    def _run(self, call: Callable[[], object]) -> None:
        current_task.set(self._task)
        try:
            self._returned.set_result(call())
        except BaseException as error:
            self._returned.set_exception(error)
        finally:
            self._requests.close()

    def _cancel(self, failure: Failure) -> None:
        """Cancel a coroutine. Python cannot end a thread: what it waits for has to wake it."""
        self._requests.close()
        self._task.abandoned = failure

    def _stack(self) -> StackSummary:
        """The present stack of the rollout, outermost frame first."""
        stack = self._task.stack
        return stack_of_thread(self._thread) if stack is None else stack()

    # -- requests and answers

    def _next(self) -> ChatRequest | None:
        """The rollout's next request; None if it has ended.

        Raises:
            BaseException: what it raised.
            CallFailed: it has asked too many untrained requests.
        """
        while (request := self._taken()) is not None:
            self._pending = request
            self._untrained += bool(self._limit) or not request.is_trained
            if self._untrained > MAX_UNTRAINED:
                what = f"made more than {MAX_UNTRAINED:,} requests with trained=False, or after EpisodeTruncated"
                raise self._failed(RefusedRequestError(410, f"{what}: end the loop that asks them", "episode_over"))
            if not (self._limit and request.is_trained):
                return request
            self._fail_pending(EpisodeTruncated(f"no answer: {self._limit}"))
        error = self._returned.exception()  # when it has ended
        if error is not None and not self._is_truncation(error):
            raise error
        return None

    def _taken(self) -> ChatRequest | None:
        try:
            return wait_until(self._requests.take, self._stack)[0]
        except CallFailed as error:  # at the deadline
            self._cancel(error.failure)
            wait([self._returned])  # if it hangs, this call is abandoned, and counted
            raise

    def _is_truncation(self, error: BaseException | None) -> bool:
        """Whether an error is the one that a limit raised, or was raised from it; a client's error has its code. One
        that the rollout's own `except` has raised is its failure."""
        while error is not None and self._limit:
            response = getattr(getattr(error, "response", None), "text", "")
            if isinstance(error, EpisodeTruncated) or "context_length_exceeded" in f"{error} {response}":
                return True
            error = error.__cause__
        return False

    def _begun(self, request: ChatRequest | None) -> ResetResult:
        if request is None:
            what = f"returned {shown(self._returned.result())} without asking the policy"
            what += ": call endpoint.chat, or ask endpoint.base_url"
            raise wrong_type(what)
        if not request.is_trained:
            return ResetResult(untrained=_untrained(request))
        self._messages, self._tools = list(request.messages), request.tools or ()
        return ResetResult(self._tools, runs_tools=bool(self._tools), prompt=list(request.messages))

    def _answer(self, turn: AssistantTurn) -> None:
        """Answer the pending request, or refuse it as there is no room for an answer."""
        request = self._pending
        if request is None:
            return
        if turn.limit:
            self._limit = turn.limit if request.is_trained else self._limit
            self._fail_pending(EpisodeTruncated(f"no answer: {turn.limit}"))
            return
        self._answers += 1
        answer = chat_answer(turn, self._answers)
        if request.is_trained:
            self._messages.append(read_message(answer.message))
            self._calls = turn.calls
        self._pending = None
        request.answer.set_result(answer)

    def _failed(self, error: Exception) -> CallFailed:
        """The failure of an episode whose pending request gets this error."""
        self._fail_pending(error)
        return wrong_type(str(error))

    def _fail_pending(self, error: Exception) -> None:
        request, self._pending = self._pending, None
        if request is not None:
            request.answer.set_exception(error)


def _untrained(request: ChatRequest) -> UntrainedChat:
    return UntrainedChat(request.messages, request.tools or ())


AnySession: TypeAlias = Session | RolloutSession
"""A session. One that is in another process or on a server has the same methods, and counts as one of these."""


def is_served(environment: object) -> bool:
    """Whether an environment is a ServedEnvironment, whose module takes long to import."""
    return hasattr(type(environment), "served_source")


def session_for(environment: Any, case: Case | None = None) -> AnySession:
    """The session of a new episode; `case` is needed for an environment that a server has."""
    if is_served(environment):
        session: AnySession = environment.session(case)
        return session
    return RolloutSession(environment) if env_kind(environment) == "rollout" else Session(environment)
