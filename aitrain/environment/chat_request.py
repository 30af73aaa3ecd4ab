"""Requests of a `rollout` to the policy, in OpenAI's chat format: read into messages of our own, and the conversation
that is trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aitrain.environment.schema_tool import function_part, shown_tool
from aitrain.environment.session import AssistantTurn, Message, TokenUsage
from aitrain.environment.tool_call_parser import ToolJson, clean, short
from aitrain.environment.tool_schema import InvalidToolError
from aitrain.errors import AitrainError

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
