"""Sessions: the environment's side of one episode, from its start to its score.

A session runs in the process of the environment's code, which may be a worker: arguments and results are plain data.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from aitrain.environment.contract import (
    MODEL_ARGUMENTS,
    Case,
    Prompt,
    ToolResult,
    arguments_for,
    copy_arguments,
    named_by,
    with_opening,
)
from aitrain.environment.score_parsing import ZERO_TO_ONE, Bounds, ScoreResult, parse_score, shown
from aitrain.environment.tool_call_parser import ToolCall
from aitrain.environment.tools import Tools
from aitrain.errors import EnvironmentFailed
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure


@dataclass(frozen=True)
class GroupMember:
    """One episode of a group, and its own score, None if it failed."""

    completion: str | list[Message]
    text: str
    messages: list[Message]
    result: ScoreResult


@dataclass(frozen=True)
class Group:
    """The episodes of one case that are compared."""

    case: Case
    members: Sequence[GroupMember]

    def arguments(self) -> dict[str, Any]:
        """All arguments for `score_group`; a column with one of our names is not passed."""
        results = [member.result for member in self.members]
        return {
            **self.case.row,
            "completions": [member.completion for member in self.members],
            "texts": [member.text for member in self.members],
            "messages": [member.messages for member in self.members],
            "scores": [result.score for result in results],
            "metrics": [result.metrics for result in results],
            "case_idx": self.case.case_idx,
            "prompt": self.case.prompt,
            "case": dict(self.case.row),
        }


Message = dict[str, Any]


@dataclass(frozen=True)
class TokenUsage:
    """Numbers of tokens: before an answer, and of the answer; `is_cut` if it was cut off."""

    prompt: int
    completion: int
    is_cut: bool = False


@dataclass(frozen=True)
class AssistantTurn:
    """One answer of the model: its text, and the tool calls that were in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage | None = None
    limit: str = ""
    """In place of an answer, to a `rollout` only: the limit that leaves no room for one."""


@dataclass(frozen=True)
class UntrainedChat:
    """A conversation in which the policy's weights answer once, outside of the trajectory."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class ResetResult:
    """The start of an episode: the conversation before the first answer, and the schemas of its tools."""

    tools: tuple[dict[str, Any], ...] = ()
    messages: tuple[Message, ...] = ()
    """What the environment says first; `prompt` holds it."""
    runs_tools: bool = False
    """Whether tool calls in the answers are parsed; if not, the environment gets the answers unchanged."""
    takes_calls: bool = False
    """Whether the environment runs the calls itself."""
    prompt: Prompt | None = None
    """The whole conversation before the first answer; None: the row's prompt."""
    untrained: UntrainedChat | None = None
    """A conversation to answer before the episode begins: then the response to its answer has `reset`."""
    note: str = ""
    """A note for the user, shown once."""


@dataclass(frozen=True)
class EnvResponse:
    """The environment's response to an answer: messages, or the end of the episode, perhaps with last messages."""

    messages: tuple[Message, ...] = ()
    is_over: bool = False
    calls: int = 0
    wrong_calls: int = 0
    """Number of the `calls` that were malformed, so that the tool was not run."""
    untrained: UntrainedChat | None = None
    """A conversation to answer first; its answer is the next argument of `Session.respond`."""
    reset: ResetResult | None = None
    """The start of an episode that began with an untrained conversation."""
    note: str = ""
    """A note for the user, shown once."""


class SessionLike(Protocol):
    """A session, in this process, another one, or on a server."""

    def open(self, arguments: dict[str, Any]) -> ResetResult: ...
    def respond(self, turn: AssistantTurn) -> EnvResponse: ...
    def score(self, arguments: dict[str, Any]) -> ScoreResult: ...
    def close(self) -> None: ...


@contextmanager
def within(place: str) -> Iterator[None]:
    """Turn an error of the user's code into a CallFailed with this place.

    Raises:
        CallFailed: it raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = as_failure(error.__cause__ if isinstance(error, EnvironmentFailed) and error.__cause__ else error)
        raise CallFailed(replace(failure, place=failure.place or place)) from error


class Session(ABC):
    """The environment's side of one episode. Errors of the user's code are raised as CallFailed with their place."""

    def __init__(self, environment: Any, bounds: Bounds = ZERO_TO_ONE) -> None:
        self.environment, self.bounds = environment, bounds
        self.tools = Tools.of(None)

    def open(self, arguments: Mapping[str, Any]) -> ResetResult:
        """Begin the episode; `arguments` are those of `episode` and `start`."""
        opening = self._begin(arguments)
        messages = () if opening is None else _as_messages(opening, self._opening_place)
        asked: Prompt = arguments.get("prompt") or []
        if isinstance(asked, str) and self.tools.of_schemas:
            self.tools = Tools.of(None)  # without a chat template, the model is not shown the schemas
        prompt = with_opening(asked, messages)
        if not prompt:
            what = "said nothing, and the row has no prompt: return or yield what the model is to answer"
            raise _wrong_type(self._opening_place, what)
        is_parsed = len(self.tools) > 0 or (self._takes_calls and bool(self.tools.schemas))
        return ResetResult(tuple(self.tools.schemas), messages, is_parsed, self._takes_calls, prompt)

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Run the answer's tool calls; an answer without calls goes to the environment."""
        if turn.calls and not self.tools.are_only_shown:
            return self._use_tools(turn.calls)
        response = self._respond(turn)
        is_over = response is None
        if isinstance(response, ToolResult):  # of `step`
            is_over = response.done
            response = response.content
        return EnvResponse(() if response is None and is_over else _as_messages(response, self._place), is_over)

    def _use_tools(self, calls: tuple[ToolCall, ...]) -> EnvResponse:
        """Run the calls one after another, as a later one may depend on an earlier one, until one ends the episode."""
        messages, wrong = list[Message](), 0
        for call in calls:
            with within(f"the tool {call.name}"):
                outcome = self.tools.run(call)
            messages.append({"role": "tool", "name": call.name, "content": outcome.text})
            wrong += outcome.is_wrong
            if outcome.ends_episode:
                break
        return EnvResponse(tuple(messages), outcome.ends_episode, calls=len(messages), wrong_calls=wrong)

    @abstractmethod
    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """Score the episode, also one that a limit ended; `arguments` are those of `score_episode`."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """The method that returns the environment's messages."""

    @property
    def _opening_place(self) -> str:
        """The method that returns what the environment says first."""
        return self._place

    _takes_calls = False
    """Whether the environment gets the tool calls of the answers."""

    @abstractmethod
    def _begin(self, arguments: Mapping[str, Any]) -> Any:
        """Begin; returns the environment's messages before the first answer, or None."""

    @abstractmethod
    def _respond(self, turn: AssistantTurn) -> Any:
        """The environment's messages after an answer; None ends the episode."""

    def close(self) -> None:
        """Release the episode's resources; errors are only logged."""
        try:
            self._close()
        except (Exception, SystemExit):
            traceback.print_exc()

    @abstractmethod
    def _close(self) -> None:
        """Release the episode's resources; `_begin` may not have finished."""


class SingleTurnSession(Session):
    """`score_episode`: tools as long as the model calls them, then one answer."""

    _place = "score_episode"

    def _begin(self, arguments: Mapping[str, Any]) -> None:
        with within("get_tools"):
            self.tools = Tools.of(self.environment)

    def _respond(self, turn: AssistantTurn) -> None:
        return None

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """What `score_episode` returns."""
        method = self.environment.score_episode
        with within("score_episode"):
            return parse_score(
                run_if_async(method(**copy_arguments(arguments_for(method, arguments), shared=MODEL_ARGUMENTS))),
                self.bounds,
            )

    def _close(self) -> None:
        pass


class GeneratorSession(Session):
    """`episode`: a generator that is sent the answers, yields messages, and returns the score."""

    _place = "episode"
    returned: Any = None
    is_over = False

    def _begin(self, arguments: Mapping[str, Any]) -> Any:
        with within("get_tools"):
            self.tools = Tools.of(self.environment)
        method = self.environment.episode
        with within("episode"):
            self.generator = method(**copy_arguments(arguments_for(method, arguments)))
            if not hasattr(self.generator, "send"):
                raise _wrong_type("episode", f"returned {shown(self.generator)}, not a generator: it has no `yield`")
            response = self._advance(None)
        if self.is_over:
            raise _wrong_type("episode", "ended before the model's first answer: `reply = yield` gets it")
        return response

    def _respond(self, turn: AssistantTurn) -> Any:
        with within("episode"):
            response = self._advance(turn.text)
        if response is None and not self.is_over:
            raise _wrong_type("episode", "yielded None after an answer: yield what to say next, or return the score")
        return response

    def _advance(self, sent: str | None) -> Any:
        try:
            return self.generator.send(sent)
        except StopIteration as stop:
            self.is_over, self.returned = True, stop.value
            return None

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """The generator's return value.

        If a limit ended the episode, GeneratorExit is raised in the generator, which may catch it and return a score;
        otherwise the score is 0, or the lowest one of a range without 0.
        """
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
    """`start`: an object with `step`, `score`, and perhaps `opening`, `get_tools` and `close`, each of which may be
    async. If `step` names `calls`, it gets all answers, with their tool calls; otherwise the tools are run here. A
    ToolResult with `done` that `step` returns is the last message of the episode."""

    _place = "step"
    _opening_place = "opening"

    def _begin(self, arguments: Mapping[str, Any]) -> Any:
        method = self.environment.start
        with within("start"):
            self.object = run_if_async(method(**copy_arguments(arguments_for(method, arguments))))
        for name in ("step", "score"):
            if not callable(getattr(self.object, name, None)):
                raise _wrong_type("start", f"returned {shown(self.object)}, which has no {name}")
        self._takes_calls = "calls" in (named_by(self.object.step) or ())
        with within("get_tools"):
            owner = self.object if hasattr(self.object, "get_tools") else self.environment
            self.tools = Tools.of(owner, runs_calls=not self._takes_calls)
        if not callable(getattr(self.object, "opening", None)):  # an attribute of this name is the object's own
            return None
        with within("opening"):
            return run_if_async(self.object.opening())

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Run the answer's tool calls, or give them to `step`."""
        response = super().respond(turn)
        if not (self._takes_calls and turn.calls):
            return response
        wrong = sum(bool(call.problem) for call in turn.calls)
        return replace(response, calls=len(turn.calls), wrong_calls=wrong)

    def _respond(self, turn: AssistantTurn) -> Any:
        with within("step"):
            if not self._takes_calls:
                return run_if_async(self.object.step(turn.text))
            response = run_if_async(self.object.step(turn.text, calls=list(turn.calls)))
        content = response.content if isinstance(response, ToolResult) else response
        if turn.calls and isinstance(content, str):
            content = {"role": "tool", "name": turn.calls[0].name, "content": content}
        return replace(response, content=content) if isinstance(response, ToolResult) else content

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """What the object's `score` returns."""
        with within("score"):
            return parse_score(run_if_async(self.object.score()), self.bounds)

    def _close(self) -> None:
        close = getattr(getattr(self, "object", None), "close", None)
        if callable(close):
            run_if_async(close())


def _as_messages(response: Any, place: str) -> tuple[Message, ...]:
    """Text becomes a user message; messages are copied."""
    if isinstance(response, str):
        return ({"role": "user", "content": response},)
    messages = [response] if isinstance(response, Mapping) else response
    if isinstance(messages, (list, tuple)) and messages and all(_is_message(message) for message in messages):
        return tuple(dict(message) for message in messages)
    what = f'responded with {shown(response)}, which is neither text nor messages with "role" and "content"'
    raise _wrong_type(place, what)


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), (str, list))


def _wrong_type(place: str, message: str) -> CallFailed:
    return CallFailed(Failure("wrong_type", message, place=place))
