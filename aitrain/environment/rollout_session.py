"""The session of `rollout`: code of the environment that asks the policy itself, and is suspended while it waits."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from traceback import StackSummary
from typing import Any

from aitrain.environment.contract import Case, arguments_for, copy_arguments, env_kind
from aitrain.environment.endpoint import (
    BlockingEndpoint,
    ChatAnswer,
    Endpoint,
    EpisodeFailedError,
    PendingRequest,
    RequestQueue,
    TrainedConversation,
)
from aitrain.environment.score_parsing import ZERO_TO_ONE, Bounds, ScoreResult, parse_score, shown
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import (
    AssistantTurn,
    EnvResponse,
    GeneratorSession,
    Message,
    ObjectSession,
    ResetResult,
    Session,
    SessionLike,
    SingleTurnSession,
    UntrainedChat,
    within,
)
from aitrain.errors import EpisodeTruncated
from aitrain.execution.async_calls import replace_if_blocked, run_if_async, running_loop
from aitrain.execution.failure import CallFailed, Failure, as_failure
from aitrain.execution.stacks import stack_of_awaitable, stack_of_thread
from aitrain.execution.task import current_task, on_cancel


class BackgroundRun(ABC):
    """One run of user code; `on_end` is called, in any thread, when it has returned or raised."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.value: object = None
        """What the code returned."""
        self.error: BaseException | None = None
        """What it raised."""
        self.ended = threading.Event()
        self._on_end = on_end

    def _end(self) -> None:
        self.ended.set()
        self._on_end()

    @abstractmethod
    def cancel(self) -> None:
        """Ask the code to end, without waiting for it."""

    @abstractmethod
    def stack(self) -> StackSummary:
        """Its present stack, outermost frame first."""

    @abstractmethod
    def blocks_loop(self, seconds: float) -> bool:
        """Whether it is a coroutine that keeps the shared event loop busy for so long."""


class CoroutineRun(BackgroundRun):
    """Runs a coroutine on the shared event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], on_end: Callable[[], None]) -> None:
        super().__init__(on_end)
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._loop = running_loop()
        asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        current_task.set(None)  # the call that started it ends before it does
        try:
            self.value = await self._coroutine
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def cancel(self) -> None:
        """Cancel the coroutine; if it blocks the event loop, later coroutines get a new one."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        threading.Thread(target=replace_if_blocked, args=(self._loop,), daemon=True).start()

    def stack(self) -> StackSummary:
        """The frames that it awaits, or those of the thread that it blocks."""
        return stack_of_awaitable(self._coroutine)

    def blocks_loop(self, seconds: float) -> bool:
        """Whether the loop does not get on with anything else for so long, because of this coroutine."""
        gets_on = threading.Event()
        self._loop.call_soon_threadsafe(gets_on.set)
        return not gets_on.wait(seconds) and asyncio.current_task(self._loop) is self._task


class ThreadRun(BackgroundRun):
    """Runs a function in a thread of its own. Python cannot end a thread, so `cancel` does nothing: what the thread
    waits for has to wake it."""

    def __init__(self, function: Callable[[], object], on_end: Callable[[], None]) -> None:
        super().__init__(on_end)
        self._function = function
        self._thread = threading.Thread(target=self._run, name="environment-rollout", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = run_if_async(self._function())
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def cancel(self) -> None:
        """Do nothing."""

    def stack(self) -> StackSummary:
        """The frames of its thread."""
        return stack_of_thread(self._thread)

    def blocks_loop(self, seconds: float) -> bool:
        """False: it has a thread of its own."""
        return False


MAX_AFTER_LIMIT = 20
"""Requests after the limit of an episode that are answered with EpisodeTruncated; with more, the episode fails."""

MAX_UNTRAINED = 1_000
"""Untrained requests of one episode; with more, it fails, as nothing else ends a loop of them."""

SECONDS_TO_END = 5.0
"""Time that a rollout has to end when its session is closed."""

_SAMPLING_NOTE = (
    "The environment's requests set {names}: not used, as aitrain samples with its own options"
    " (aitrain grpo --help: Sampling)."
)


class RolloutSession(Session):
    """`rollout`: asks the policy through its endpoint, and returns the score."""

    _place = "rollout"

    def __init__(self, environment: Any, bounds: Bounds = ZERO_TO_ONE) -> None:
        super().__init__(environment, bounds)
        self._requests = RequestQueue()
        self._conversation = TrainedConversation()
        self._run: BackgroundRun | None = None
        self._endpoint: Endpoint | BlockingEndpoint | None = None
        self._pending: PendingRequest | None = None
        """The request that waits for the answer."""
        self._limit = ""
        self._refusals = self._answers = self._untrained = 0
        self._calls = self._wrong_calls = 0
        self._note = ""
        self._is_over = False

    # -- the calls of an episode

    def open(self, arguments: Mapping[str, object]) -> ResetResult:
        """Start the rollout, and wait for its first request."""
        self._start(arguments)
        return self._begun(self._next())

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Hand the answer to the rollout, and wait for its next request, or its end."""
        self._answer(turn)
        pending = self._next()
        note, self._note = self._note, ""
        if pending is not None and not pending.request.is_trained:
            return EnvResponse(untrained=_untrained(pending), note=note)
        if not self._conversation.messages:
            return EnvResponse(reset=self._begun(pending), note=note)
        calls, wrong, self._calls, self._wrong_calls = self._calls, self._wrong_calls, 0, 0
        if pending is None:
            return EnvResponse(is_over=True, calls=calls, wrong_calls=wrong, note=note)
        return EnvResponse(self._appended(pending), calls=calls, wrong_calls=wrong, note=note)

    def score(self, arguments: Mapping[str, object]) -> ScoreResult:
        """What the rollout returned.

        If a limit ended the episode, EpisodeTruncated is raised in the rollout, which may catch it and return a score;
        otherwise the score is 0, or the lowest one of a range without 0.
        """
        if not self._is_over:
            self._limit = self._limit or "a limit ended the episode"
            self._answer(AssistantTurn("", limit=self._limit))
            while self._next() is not None:
                self._answer(AssistantTurn("", limit=self._limit))
        with within(self._place):
            return parse_score(self._returned(), self.bounds)

    def _begin(self, arguments: Mapping[str, object]) -> None:
        """Not used: `open` is its own."""

    def _respond(self, turn: AssistantTurn) -> None:
        """Not used: `respond` is its own."""

    def _close(self) -> None:
        self._fail_pending(EpisodeFailedError("the episode is over", "episode_over"))
        self._requests.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._run is not None and not self._run.ended.is_set():
            self._run.cancel()
            self._run.ended.wait(SECONDS_TO_END)

    # -- the rollout

    def _start(self, arguments: Mapping[str, object]) -> None:
        method = self.environment.rollout
        is_async = inspect.iscoroutinefunction(inspect.unwrap(method))
        self._endpoint = Endpoint(self._requests) if is_async else BlockingEndpoint(self._requests)
        with within(self._place):
            named = arguments_for(method, {**arguments, "endpoint": self._endpoint})
            call = partial(method, **copy_arguments(named, shared=("endpoint",)))
            self._run = CoroutineRun(call(), self._requests.end) if is_async else ThreadRun(call, self._requests.end)
        self._requests.blocks_loop = self._run.blocks_loop

    def _next(self) -> PendingRequest | None:
        """The rollout's next request; None if it has ended.

        Raises:
            CallFailed: it raised, has asked too many untrained requests, or asks again after a limit.
        """
        run = self._run
        assert run is not None
        with on_cancel(lambda _: self._cancel(run), run.stack):
            while (pending := self._requests.take()) is not None:
                self._pending = pending
                self._note_ignored(pending)
                self._count(pending)
                if not (self._limit and pending.request.is_trained):
                    return pending
                self._refuse(self._limit)
        self._is_over = True
        if run.error is not None and not self._is_truncation(run.error):
            failure = as_failure(run.error)
            raise CallFailed(replace(failure, place=failure.place or self._place)) from run.error
        return None

    def _cancel(self, run: BackgroundRun) -> None:
        """End the rollout at the deadline; the call waits until it has ended."""
        self._requests.close()
        run.cancel()

    def _returned(self) -> object:
        run = self._run
        assert run is not None
        if run.error is None:
            return run.value
        low, high = self.bounds
        return 0.0 if low <= 0.0 <= high else low

    def _is_truncation(self, error: BaseException | None) -> bool:
        """Whether an error is the one that a limit raised, or was caused by it; a client's error has its code."""
        while error is not None and self._limit:
            response = getattr(getattr(error, "response", None), "text", "")
            if isinstance(error, EpisodeTruncated) or "context_length_exceeded" in f"{error} {response}":
                return True
            error = error.__cause__ or error.__context__
        return False

    # -- requests and answers

    def _begun(self, pending: PendingRequest | None) -> ResetResult:
        if pending is None:
            returned = shown(self._run and self._run.value)
            what = f"returned {returned} without asking the policy: call endpoint.chat, or ask endpoint.base_url"
            raise CallFailed(Failure("wrong_type", what, place=self._place))
        note, self._note = self._note, ""
        request = pending.request
        if not request.is_trained:
            return ResetResult(untrained=_untrained(pending), note=note)
        self._conversation.begin(request)
        tools = self._conversation.tools
        return ResetResult(tools, runs_tools=bool(tools), prompt=list(request.messages), note=note)

    def _appended(self, pending: PendingRequest) -> tuple[Message, ...]:
        try:
            return self._conversation.append(pending.request)
        except EpisodeFailedError as error:
            self._fail_pending(error)
            raise CallFailed(Failure("wrong_type", str(error), place=self._place)) from None

    def _answer(self, turn: AssistantTurn) -> None:
        """Answer the pending request, or refuse it as there is no room for an answer."""
        pending = self._pending
        if pending is None:
            return
        if turn.limit:
            if pending.request.is_trained:
                self._limit = turn.limit
            self._refuse(turn.limit)
            return
        self._answers += 1
        answer = ChatAnswer.of(turn, self._answers)
        if pending.request.is_trained:
            self._conversation.add_answer(answer)
            self._calls, self._wrong_calls = len(turn.calls), sum(bool(call.problem) for call in turn.calls)
        self._pending = None
        pending.answer.set_result(answer)

    def _refuse(self, limit: str) -> None:
        self._fail_pending(EpisodeTruncated(f"no answer: {limit}"))
        self._refusals += 1
        if self._refusals > MAX_AFTER_LIMIT:
            what = f"asked the policy {MAX_AFTER_LIMIT} times after EpisodeTruncated: return the score instead"
            raise CallFailed(Failure("wrong_type", what, place=self._place))

    def _count(self, pending: PendingRequest) -> None:
        self._untrained += not pending.request.is_trained
        if self._untrained > MAX_UNTRAINED:
            error = EpisodeFailedError(
                f"made more than {MAX_UNTRAINED:,} requests with trained=False in one episode: end the loop that asks"
                " them",
                "episode_over",
            )
            self._fail_pending(error)
            raise CallFailed(Failure("wrong_type", str(error), place=self._place))

    def _fail_pending(self, error: Exception) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.answer.set_exception(error)

    def _note_ignored(self, pending: PendingRequest) -> None:
        if pending.request.ignored:
            self._note = _SAMPLING_NOTE.format(names=", ".join(pending.request.ignored))


def _untrained(pending: PendingRequest) -> UntrainedChat:
    return UntrainedChat(pending.request.messages, pending.request.tools or ())


_SESSIONS: dict[str, type[Session]] = {
    "score_episode": SingleTurnSession,
    "episode": GeneratorSession,
    "start": ObjectSession,
    "rollout": RolloutSession,
}


def session_for(environment: Any, bounds: Bounds = ZERO_TO_ONE, case: Case | None = None) -> SessionLike:
    """The session of a new episode; `case` is needed for an environment that a server has."""
    if isinstance(environment, ServedEnvironment):
        return environment.session(case, bounds)
    return _SESSIONS[env_kind(environment)](environment, bounds)
