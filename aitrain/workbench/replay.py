"""Replays the saved answers of an episode in a new one, as long as the environment says what it said then."""

from __future__ import annotations

from dataclasses import dataclass

from aitrain.environment.session import AssistantTurn, Message
from aitrain.environment.tool_call_parser import ToolCall
from aitrain.runs.json_values import JsonObject, as_object, as_objects
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import to_jsonable
from aitrain.workbench.player import Conversation, PlayedEpisode

DIFFERENT = "the environment answered differently"
LIMITS = ("max_turns", "truncated")
"""Values of `stop` after which the environment would have gone on."""


@dataclass
class Replay:
    """A policy that gives the answers of a record; `is_different` if the environment's side is not the recorded one."""

    record: RolloutRecord
    is_different: bool = False

    @property
    def answers(self) -> int:
        """How many answers the record holds."""
        return sum(message.get("role") == "assistant" for message in self.record.messages)

    def __call__(self, conversation: Conversation) -> AssistantTurn | None:
        """The next recorded answer; None after the last one, and where the conversations part."""
        if conversation.answers >= self.answers:
            return None
        said, recorded = whole(conversation), self.record.messages
        rest = recorded[len(said) :]
        if not _agree(said, recorded) or not rest or rest[0].get("role") != "assistant":
            self.is_different = True
            return None
        return _turn(rest[0], rest[1:], self.record.tools)


def whole(conversation: Conversation) -> list[Message]:
    """All messages of a conversation, as a record holds them: a prompt that is a string is a message of the user."""
    prompt = conversation.prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*asked, *conversation.messages]


def problem_of(played: PlayedEpisode, replay: Replay) -> str:
    """Why a replayed episode is not the recorded one; empty if it is, so that its score counts."""
    if played.failure is not None:
        return ""  # its score is missing, which is a result
    said, recorded, stop = whole(played.conversation), replay.record.messages, replay.record.stop
    is_done = played.stop == "done"
    if replay.is_different or len(played.turns) != replay.answers or not _agree(said[: len(recorded)], recorded):
        return DIFFERENT
    if stop in ("env_error", "env_timeout"):
        return "" if is_done else "a failure of the environment had cut it off"
    if stop in LIMITS:
        return DIFFERENT if is_done else ""
    return "" if is_done and len(said) == len(recorded) else DIFFERENT


def _agree(said: list[Message], recorded: list[JsonObject]) -> bool:
    """Whether the environment's messages are those of the record; answers are the record's own."""
    pairs = zip(said, recorded, strict=False)
    return len(said) <= len(recorded) and all(
        one["role"] == "assistant" or to_jsonable(one) == other for one, other in pairs
    )


def _turn(message: JsonObject, after: list[JsonObject], tools: list[JsonObject]) -> AssistantTurn:
    """The answer as the environment got it."""
    content = message.get("content")
    calls = as_objects(message.get("tool_calls"))
    results = [str(result.get("content")) for result in after[: len(calls)] if result.get("role") == "tool"]
    results += [""] * (len(calls) - len(results))
    turns = (_call(as_object(call.get("function")), text, tools) for call, text in zip(calls, results, strict=True))
    return AssistantTurn(content if isinstance(content, str) else str(content or ""), tuple(turns))


def _call(function: JsonObject, result: str, tools: list[JsonObject]) -> ToolCall:
    """A recorded call. One that could not be read is recorded without arguments, and its result is the problem: such a
    call ran no tool, and must run none now."""
    name, arguments = str(function.get("name") or ""), as_object(function.get("arguments"))
    if not arguments and result.startswith("error: ") and name not in _without_required(tools):
        return ToolCall(name, None, result.removeprefix("error: "))
    return ToolCall(name, arguments)


def _without_required(tools: list[JsonObject]) -> set[str]:
    """Names of the tools that can be called without arguments."""
    functions = [as_object(tool.get("function", tool)) for tool in tools]
    return {str(one.get("name")) for one in functions if not as_object(one.get("parameters")).get("required")}
