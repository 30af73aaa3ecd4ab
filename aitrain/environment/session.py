"""Sessions: the environment's side of one episode, from its start to its score.

A session lives where the environment's code runs, which may be another process: plain data goes in and comes out.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from aitrain.environment.contract import MODEL_WORDS, arguments_for, level_of
from aitrain.environment.judging import ZERO_TO_ONE, Bounds, ScoreResult, parse_score, shown
from aitrain.environment.row_copies import copy_arguments
from aitrain.environment.tool_call_parser import ToolCall
from aitrain.environment.tools import Tools
from aitrain.errors import EnvironmentFailed
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure

Message = dict[str, Any]


@dataclass(frozen=True)
class AssistantTurn:
    """One answer of the model: its text, and the tool calls that were in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ResetResult:
    """How an episode begins: the schemas of its tools, and what the environment says before the first answer."""

    tools: tuple[dict[str, Any], ...] = ()
    messages: tuple[Message, ...] = ()
    runs_tools: bool = False
    """Whether calls are read from the answers and carried out; if not, the environment gets the answers as they are."""


@dataclass(frozen=True)
class EnvResponse:
    """What the environment does after an answer: it says something, or ends the episode."""

    messages: tuple[Message, ...] = ()
    is_over: bool = False
    calls: int = 0
    wrong_calls: int = 0
    """Of the tool calls in the answer, those that could not be carried out as they were written."""


@contextmanager
def within(place: str) -> Iterator[None]:
    """Whatever the user's code raises in here is a failure of that place.

    Raises:
        CallFailed: it raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        told = error.__cause__ if isinstance(error, EnvironmentFailed) and error.__cause__ else error
        failure = as_failure(told)
        raise CallFailed(replace(failure, place=failure.place or place)) from error


def session_for(environment: Any, bounds: Bounds = ZERO_TO_ONE) -> Session:
    """The environment's side of a new episode, by what the environment has: score_episode, episode or start."""
    return _DIALOGUES[level_of(environment)](environment, bounds)


class Session(ABC):
    """One episode, seen from the environment. User code that raises comes out as CallFailed, with its place."""

    def __init__(self, environment: Any, bounds: Bounds = ZERO_TO_ONE) -> None:
        self.environment, self.bounds = environment, bounds
        self.tools = Tools.of(None)

    def open(self, words: Mapping[str, Any]) -> ResetResult:
        """Begin; `words` are what `episode` and `start` may ask for."""
        said = self._begin(words)
        messages = () if said is None else _as_messages(said, self._place)
        if isinstance(words.get("prompt"), str) and self.tools.of_schemas:
            self.tools = Tools.of(None)  # no chat template shows them, so that the model cannot know of them
        return ResetResult(tuple(self.tools.schemas), messages, len(self.tools) > 0)

    def answer(self, reply: AssistantTurn) -> EnvResponse:
        """Carry out the answer's tool calls; an answer without any goes to the environment."""
        if reply.calls and not self.tools.are_only_shown:
            return self._use_tools(reply.calls)
        said = self._reply(reply.text)
        return EnvResponse(is_over=True) if said is None else EnvResponse(_as_messages(said, self._place))

    def _use_tools(self, calls: tuple[ToolCall, ...]) -> EnvResponse:
        """One after another, as the second may build on what the first did."""
        messages, wrong = [], 0
        for call in calls:
            with within(f"the tool {call.name}"):
                text, is_wrong = self.tools.answer(call)
            messages.append({"role": "tool", "name": call.name, "content": text})
            wrong += is_wrong
        return EnvResponse(tuple(messages), calls=len(calls), wrong_calls=wrong)

    @abstractmethod
    def score(self, words: Mapping[str, Any]) -> ScoreResult:
        """What the episode is worth, also one that a limit ended; `words` are what `score_episode` may ask for."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """The method that what the environment says comes from."""

    @abstractmethod
    def _begin(self, words: Mapping[str, Any]) -> Any:
        """Begin; returns what the environment says before the first answer, None where it says nothing."""

    @abstractmethod
    def _reply(self, text: str) -> Any:
        """What the environment says to an answer, None: the episode is over."""

    def close(self) -> None:
        """Let go of what the episode holds; what goes wrong now is for the log only."""
        try:
            self._close()
        except (Exception, SystemExit):
            traceback.print_exc()

    @abstractmethod
    def _close(self) -> None:
        """Let go of what the episode holds, however far it came."""


class SingleTurnSession(Session):
    """`score_episode`: tools as long as the model calls them, then one answer."""

    _place = "score_episode"

    def _begin(self, words: Mapping[str, Any]) -> None:
        with within("get_tools"):
            self.tools = Tools.of(self.environment)

    def _reply(self, text: str) -> None:
        return None

    def score(self, words: Mapping[str, Any]) -> ScoreResult:
        """What `score_episode` returns."""
        method = self.environment.score_episode
        with within("score_episode"):
            return parse_score(
                run_if_async(method(**copy_arguments(arguments_for(method, words), shared=MODEL_WORDS))), self.bounds
            )

    def _close(self) -> None:
        pass


class GeneratorSession(Session):
    """`episode`: a generator that is sent the answers, yields what it says, and returns the score."""

    _place = "episode"
    returned: Any = None
    is_over = False

    def _begin(self, words: Mapping[str, Any]) -> Any:
        with within("get_tools"):
            self.tools = Tools.of(self.environment)
        method = self.environment.episode
        with within("episode"):
            self.generator = method(**copy_arguments(arguments_for(method, words)))
            if not hasattr(self.generator, "send"):
                raise _wrong_type("episode", f"returned {shown(self.generator)}, not a generator: it has no `yield`")
            said = self._advance(None)
        if self.is_over:
            raise _wrong_type("episode", "ended before the model's first answer: `reply = yield` gets it")
        return said

    def _reply(self, text: str) -> Any:
        with within("episode"):
            said = self._advance(text)
        if said is None and not self.is_over:
            raise _wrong_type("episode", "yielded None after an answer: yield what to say next, or return the score")
        return said

    def _advance(self, sent: str | None) -> Any:
        try:
            return self.generator.send(sent)
        except StopIteration as stop:
            self.is_over, self.returned = True, stop.value
            return None

    def score(self, words: Mapping[str, Any]) -> ScoreResult:
        """What the generator returned. One that a limit ended is closed first, as Python closes generators: it may
        catch GeneratorExit and return what the unfinished episode is worth, which is 0 otherwise, or the lowest score
        of a range without 0."""
        with within("episode"):
            if not self.is_over:
                self._end_early()
            return parse_score(self.returned, self.bounds)

    def _end_early(self) -> None:
        low, high = self.bounds
        self.is_over, self.returned = True, 0.0 if low <= 0.0 <= high else low
        try:
            self.generator.throw(GeneratorExit)
        except StopIteration as stop:
            self.returned = stop.value
        except GeneratorExit:
            pass

    def _close(self) -> None:
        if hasattr(self, "generator"):
            self.generator.close()


class ObjectSession(Session):
    """`start`: an object with `step`, `score`, and perhaps `get_tools` and `close`, each of which may be async."""

    _place = "step"

    def _begin(self, words: Mapping[str, Any]) -> None:
        method = self.environment.start
        with within("start"):
            self.object = run_if_async(method(**copy_arguments(arguments_for(method, words))))
        for name in ("step", "score"):
            if not callable(getattr(self.object, name, None)):
                raise _wrong_type("start", f"returned {shown(self.object)}, which has no {name}")
        with within("get_tools"):
            self.tools = Tools.of(self.object if hasattr(self.object, "get_tools") else self.environment)

    def _reply(self, text: str) -> Any:
        with within("step"):
            return run_if_async(self.object.step(text))

    def score(self, words: Mapping[str, Any]) -> ScoreResult:
        """What the object's `score` returns."""
        with within("score"):
            return parse_score(run_if_async(self.object.score()), self.bounds)

    def _close(self) -> None:
        close = getattr(getattr(self, "object", None), "close", None)
        if callable(close):
            run_if_async(close())


_DIALOGUES: dict[str, type[Session]] = {
    "score_episode": SingleTurnSession,
    "episode": GeneratorSession,
    "start": ObjectSession,
}


def _as_messages(said: Any, place: str) -> tuple[Message, ...]:
    """Text is the user's; messages are taken as they are."""
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    messages = [said] if isinstance(said, Mapping) else said
    if isinstance(messages, (list, tuple)) and messages and all(_is_message(message) for message in messages):
        return tuple(dict(message) for message in messages)
    raise _wrong_type(place, f'said {shown(said)}, which is neither text nor messages with "role" and "content"')


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), (str, list))


def _wrong_type(place: str, message: str) -> CallFailed:
    return CallFailed(Failure("wrong_type", message, place=place))
