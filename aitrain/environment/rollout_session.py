"""The session of `rollout`: code of the environment that asks the policy itself, and is suspended while it waits."""

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from traceback import StackSummary
from typing import Any

from aitrain.environment.completion_parser import ToolJson
from aitrain.environment.contract import (
    UNFINISHED,
    Case,
    ScoreResult,
    call_by_name,
    env_kind,
    parse_score,
    shown,
)
from aitrain.environment.endpoint import ChatRequest, Endpoint, new_messages
from aitrain.environment.http_server import RefusedRequestError
from aitrain.environment.session import (
    AssistantTurn,
    EnvResponse,
    Message,
    Session,
    wrong_type,
)
from aitrain.errors import EpisodeTruncated
from aitrain.execution.deadline_pool import CANCELLED
from aitrain.execution.failure import CallFailed
from aitrain.execution.task import Task, current_task, wait_until
from aitrain.execution.user_code import stack_of_thread

MAX_UNTRAINED = 1_000
"""Untrained requests of one episode, and those after its limit; with more, it fails, as nothing else ends a loop of
them."""

SECONDS_TO_END = 5.0
"""Time that a rollout has to end when its session is closed."""


class RolloutSession(Session):
    """`rollout`: asks the policy through its endpoint, and returns the score. It runs in a thread for as long as the
    session; `async def` runs on the shared event loop."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._endpoint = Endpoint(inspect.iscoroutinefunction(inspect.unwrap(environment.rollout)))
        self._returned = Future[object]()
        self._task = Task(math.inf)
        self._thread = threading.Thread()  # of `open`
        self._messages = list[Message]()
        """The conversation that is trained."""
        self._tools: tuple[ToolJson, ...] = ()
        self._pending: ChatRequest | None = None
        """The request that waits for the answer."""
        self._limit = ""
        self._untrained = 0

    # -- the calls of an episode

    def open(self, arguments: Mapping[str, Any]) -> EnvResponse:
        """Start the rollout, and wait for its first request."""
        call = partial(call_by_name, self.environment.rollout, {**arguments, "endpoint": self._endpoint}, ["endpoint"])
        self._thread = threading.Thread(target=self._run, args=(call,), name="environment-rollout", daemon=True)
        self._thread.start()
        return self._response()

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Hand the answer to the rollout, and wait for its next request, or its end."""
        self._answer(turn)
        return self._response()

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """What the rollout returned. If a limit ended the episode, EpisodeTruncated is raised in the rollout, which may
        catch it and return a score; otherwise the episode is unfinished."""
        self._limit = self._limit or "a limit ended the episode"
        refusal = AssistantTurn("", limit=self._limit)
        self._answer(refusal)
        while self._next() is not None:
            self._answer(refusal)
        is_scored = self._returned.exception() is None
        return parse_score(self._returned.result()) if is_scored else UNFINISHED

    def close(self) -> None:
        """End the rollout, also if `open` has not finished."""
        self._fail_pending(RefusedRequestError(410, "the episode is over", "episode_over"))
        self._endpoint.close()
        if self._thread.is_alive():
            self._task.abandoned = CANCELLED
            wait([self._returned], SECONDS_TO_END)

    # -- the thread

    def _run(self, call: Callable[[], object]) -> None:
        current_task.set(self._task)
        try:
            self._returned.set_result(call())
        except BaseException as error:
            self._returned.set_exception(error)
        finally:
            self._endpoint.close()

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
                raise wrong_type(f"{what}: end the loop that asks them")
            if not (self._limit and request.is_trained):
                return request
            self._fail_pending(EpisodeTruncated(f"no answer: {self._limit}"))
        error = self._returned.exception()  # when it has ended
        if error is not None and not self._is_truncation(error):
            raise error
        return None

    def _taken(self) -> ChatRequest | None:
        try:
            return wait_until(self._endpoint.take, self._stack)[0]
        except CallFailed as error:  # at the deadline
            self._endpoint.close()  # Python cannot end a thread: what it waits for has to wake it
            self._task.abandoned = error.failure  # which cancels a coroutine
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

    def _response(self) -> EnvResponse:
        """What the rollout asks next; the episode is over when it has returned."""
        request = self._next()
        if request is not None and not request.is_trained:
            return EnvResponse(prompt=list(request.messages), tools=request.tools or (), is_trained=False)
        if self._messages:
            try:
                messages = () if request is None else new_messages(self._messages, self._tools, request)
            except CallFailed as error:  # the code that made the request is told, too
                self._fail_pending(RefusedRequestError(400, error.failure.message, "conversation_rewritten"))
                raise
            self._messages += messages
            return EnvResponse(messages, is_over=request is None)
        if request is None:
            what = f"returned {shown(self._returned.result())} without asking the policy"
            what += ": call endpoint.chat, or ask endpoint.base_url"
            raise wrong_type(what)
        self._messages, self._tools = list(request.messages), request.tools or ()
        return EnvResponse(prompt=list(request.messages), tools=self._tools, runs_tools=bool(self._tools))

    def _answer(self, turn: AssistantTurn) -> None:
        """Answer the pending request, or refuse it as there is no room for an answer."""
        request = self._pending
        if request is None:
            return
        if turn.limit:
            self._limit = turn.limit if request.is_trained else self._limit
            self._fail_pending(EpisodeTruncated(f"no answer: {turn.limit}"))
            return
        if request.is_trained:
            self._messages.append(turn.message)
        self._pending = None
        request.answer.set_result(turn)

    def _fail_pending(self, error: Exception) -> None:
        request, self._pending = self._pending, None
        if request is not None:
            request.answer.set_exception(error)


def is_served(environment: object) -> bool:
    """Whether an environment is a ServedEnvironment, whose module takes long to import."""
    return hasattr(type(environment), "served_source")


def session_for(environment: Any, case: Case | None = None) -> Session:
    """The session of a new episode; `case` is needed for an environment that a server has, whose sessions have the same
    methods."""
    if is_served(environment):
        session: Session = environment.session(case)
        return session
    return RolloutSession(environment) if env_kind(environment) == "rollout" else Session(environment)
