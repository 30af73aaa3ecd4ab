"""Sessions: the environment's side of one episode, from its start to its score.

A session runs in the process of the environment's code, which may be a worker: arguments and results are plain data.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.environment.completion_parser import THOUGHT_KEYS, ToolCall
from aitrain.environment.contract import (
    MODEL_ARGUMENTS,
    UNFINISHED,
    Case,
    Prompt,
    ScoreResult,
    ToolResult,
    call_by_name,
    env_kind,
    is_message,
    named_by,
    parse_score,
    shown,
    with_opening,
)
from aitrain.environment.tools import Tools
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure

Message = dict[str, Any]


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
        return self.case.arguments(
            completions=[member.completion for member in self.members],
            texts=[member.text for member in self.members],
            messages=[member.messages for member in self.members],
            scores=[result.score for result in results],
            metrics=[result.metrics for result in results],
        )


@dataclass(frozen=True)
class AssistantTurn:
    """One answer of the model: its text, and the tool calls that were in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    """What the model thought before, if that is not in the text."""
    limit: str = ""
    """In place of an answer, to a `rollout` only: the limit that leaves no room for one."""
    prompt_tokens: int = 0
    """Number of tokens before the answer."""
    tokens: int = 0
    is_cut: bool = False
    """Whether it was cut off."""

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        said: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            said["tool_calls"] = [call.as_message_part() for call in self.calls]
        return {**said, THOUGHT_KEYS[0]: self.thought} if self.thought else said


@dataclass(frozen=True)
class EnvResponse:
    """What the environment says first, and in response to an answer: messages, or the end of the episode, perhaps with
    last messages. The first response has the prompt and the tools too."""

    messages: tuple[Message, ...] = ()
    """What the environment says; `prompt` holds it."""
    is_over: bool = False
    wrong_calls: int = 0
    """Number of well-formed tool calls in the answer that no tool took."""
    prompt: Prompt | None = None
    """The whole conversation before the first answer; None: the row's prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas of its tools."""
    runs_tools: bool = False
    """Whether tool calls in the answers are parsed; if not, the environment gets the answers unchanged."""
    is_trained: bool = True
    """False: prompt and tools are those of another conversation, which the policy's weights answer once, outside of the
    trajectory. The answer is the next argument of `Session.respond`."""


class Session:
    """The environment's side of one episode that an object plays: that of `start`, or one that stands for `episode` or
    `score_episode`."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.kind = env_kind(environment)
        self.episode: Any = None
        self.tools = Tools()
        self._takes_calls = False  # whether `step` gets the tool calls of the answers

    def open(self, arguments: Mapping[str, Any]) -> EnvResponse:
        """Begin the episode; `arguments` are those of `episode` and `start`."""
        if self.kind == "score_episode":
            self.episode = _OneAnswer()
        else:
            begun = call_by_name(getattr(self.environment, self.kind), arguments)
            self.episode = _Generator(begun) if self.kind == "episode" else begun
        if self.kind == "start":
            for name in ("step", "score"):  # before an answer is sampled for it
                if not callable(getattr(self.episode, name, None)):
                    raise wrong_type(f"returned {shown(self.episode)}, which has no {name}")
            self._takes_calls = "calls" in (named_by(self.episode.step) or ())
        owner = self.episode if hasattr(self.episode, "get_tools") else self.environment
        self.tools = Tools.of(owner, runs_calls=not self._takes_calls)
        opening = None
        if callable(getattr(self.episode, "opening", None)):  # another attribute of this name is the object's own
            opening = run_if_async(self.episode.opening())
        messages = () if opening is None else _as_messages(opening)
        asked: Prompt = arguments.get("prompt") or []
        if isinstance(asked, str) and self.tools.of_schemas:
            self.tools = Tools()  # without a chat template, the model is not shown the schemas
        prompt = with_opening(asked, messages)
        if not prompt:
            raise wrong_type("said nothing, and the row has no prompt: return or yield what the model is to answer")
        is_parsed = len(self.tools) > 0 or (self._takes_calls and bool(self.tools.schemas))
        return EnvResponse(messages, prompt=prompt, tools=tuple(self.tools.schemas), runs_tools=is_parsed)

    def respond(self, turn: AssistantTurn) -> EnvResponse:
        """Run the answer's tool calls; an answer without calls goes to the environment, and so do the calls if `step`
        takes them."""
        if turn.calls and not self.tools.are_only_shown:
            results, wrong = list[Message](), 0
            for call in turn.calls:  # one after another, as a later one may depend on an earlier one
                outcome = self.tools.run(call)
                results.append({"role": "tool", "name": call.name, "content": outcome.text})
                wrong += outcome.is_wrong and not call.problem
                if outcome.ends_episode:
                    break
            return EnvResponse(tuple(results), outcome.ends_episode, wrong)
        given = {"calls": list(turn.calls)} if self._takes_calls else {}
        response = run_if_async(self.episode.step(turn.text, **given))
        is_over = response is None
        if isinstance(response, ToolResult):
            is_over, response = response.done, response.content
        if given.get("calls") and isinstance(response, str):
            response = {"role": "tool", "name": turn.calls[0].name, "content": response}
        return EnvResponse(() if response is None and is_over else _as_messages(response), is_over)

    def score(self, arguments: Mapping[str, Any]) -> ScoreResult:
        """Score the episode, also one that a limit ended; `arguments` are those of `score_episode`, or the `completion`
        for an object of `start`."""
        method = self.environment.score_episode if self.kind == "score_episode" else self.episode.score
        returned = call_by_name(method, arguments, MODEL_ARGUMENTS)
        return UNFINISHED if returned is UNFINISHED else parse_score(returned)

    def score_group(self, group: Group) -> list[ScoreResult]:
        """What `score_group` returns for each member of a group."""
        returned = call_by_name(self.environment.score_group, group.arguments())
        returned = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(returned, (list, tuple)) or len(returned) != len(group.members):
            count = f"{len(returned)} scores" if isinstance(returned, (list, tuple)) else shown(returned)
            what = f"return a list with one score, or None, for each of {len(group.members)} episodes"
            raise wrong_type(f"returned {count}: {what}")
        return list(map(parse_score, returned))

    def close_environment(self) -> None:
        """Close the environment, of which this is the last session."""
        if callable(close := getattr(self.environment, "close", None)):
            run_if_async(close())

    def close(self) -> None:
        """Release the episode's resources, also if `open` has not finished; errors are only logged."""
        try:
            if callable(close := getattr(self.episode, "close", None)):
                run_if_async(close())
        except (Exception, SystemExit):
            traceback.print_exc()


class _OneAnswer:
    """`score_episode`: tools as long as the model calls them, then one answer."""

    def step(self, reply: str) -> None:
        """An answer without a call is the last one."""


class _Generator:
    """`episode`: a generator that is sent the answers, yields messages, and returns the score."""

    def __init__(self, generator: Any) -> None:
        if not hasattr(generator, "send"):
            what = f"returned {shown(generator)}, not a generator: write it with `def` and `yield`"
            raise wrong_type(what)
        self.generator = generator
        self.returned: Any = UNFINISHED  # until it has returned

    def opening(self) -> Any:
        """What it yields first."""
        response = self._send(None)
        if self.returned is not UNFINISHED:
            raise wrong_type("ended before the model's first answer: `reply = yield` gets it")
        return response

    def step(self, reply: str) -> Any:
        """What it yields after an answer; None if it has returned."""
        response = self._send(reply)
        if response is None and self.returned is UNFINISHED:
            raise wrong_type("yielded None after an answer: yield what to say next, or return the score")
        return response

    def _send(self, sent: str | None) -> Any:
        try:
            return self.generator.send(sent)
        except StopIteration as stop:
            self.returned = stop.value
            return None

    def score(self) -> Any:
        """The generator's return value. If a limit ended the episode, GeneratorExit is raised in the generator, which
        may catch it and return a score; otherwise the episode is unfinished."""
        if self.returned is UNFINISHED:
            try:
                self.generator.throw(GeneratorExit)
            except StopIteration as stop:
                self.returned = stop.value
            except GeneratorExit:
                pass
        return self.returned

    def close(self) -> None:
        """Raise GeneratorExit in it."""
        self.generator.close()


def _as_messages(response: Any) -> tuple[Message, ...]:
    """Text becomes a user message; messages are copied."""
    if isinstance(response, str):
        return ({"role": "user", "content": response},)
    messages = [response] if isinstance(response, Mapping) else response
    if isinstance(messages, (list, tuple)) and messages and all(map(is_message, messages)):
        return tuple({"content": "", **message} for message in messages)  # calls of tools may have no content
    what = f'responded with {shown(response)}, which is neither text nor messages with "role" and "content"'
    raise wrong_type(what)


def wrong_type(message: str) -> CallFailed:
    """The failure of a call that the user's code answered with something else than it has to."""
    return CallFailed(Failure("wrong_type", message))
