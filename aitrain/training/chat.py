"""Prompts, answers and what the environment says, as tokens and back.

Tokens are only ever appended: what the environment says is rendered as the difference of two renderings of the chat
template, so that no earlier token is written a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    parse_response,
    supports_tool_calling,
)

from aitrain import activity
from aitrain.environment.contract import Prompt
from aitrain.environment.dialogue import Message, Reply
from aitrain.environment.loading import describe
from aitrain.environment.tool_call_parser import ToolCall, read_calls
from aitrain.errors import ConfigError, EnvironmentFailed

MARK = "answer7e1f"
"""Stands for an answer of the model in renderings that are made for what follows it."""

_ASKED: Message = {"role": "user", "content": "question"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "tool", "arguments": {}}}],
}
_GENERATE = {"add_generation_prompt": True}
_THOUGHT = "<think>\nso\n</think>\n\n"
Schemas = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer of the model, read: as a message of the chat, and as the environment is told it."""

    message: Message
    reply: Reply


@dataclass(frozen=True)
class Chat:
    """How one model's conversations are written; `template` is None where it is the tokenizer's own."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template (`--trl chat_template_kwargs=...`)."""

    # -- to tokens

    def prompt_text(self, prompt: Prompt, tools: Schemas = ()) -> str:
        """What the model is given to begin with.

        Raises:
            EnvironmentFailed: the chat template refuses the messages.
        """
        if isinstance(prompt, str):
            return prompt
        try:
            return self._rendered(prompt, tools=list(tools) or None, **_GENERATE)
        except Exception as error:
            raise EnvironmentFailed(
                f"The model's chat template refuses a prompt: {describe(error)}\nThe prompt: {str(prompt)[:160]}"
            ) from error

    def prompt_ids(self, prompt: Prompt, tools: Schemas = ()) -> list[int]:
        """Its tokens; special ones are added to strings only, as a chat template writes its own."""
        activity.tick()
        return self._ids(self.prompt_text(prompt, tools), add_special_tokens=isinstance(prompt, str))

    def following_ids(self, messages: Sequence[Message], last: int, is_chat: bool) -> list[int]:
        """What is appended after an answer whose last token is `last`: the end of the assistant's turn, less the token
        that the model ended it with itself, then the messages, and the beginning of the assistant's next turn."""
        if not is_chat:
            return self._ids("".join(str(message["content"]) for message in messages))
        ids = self._ids_after_mark(self._said(messages))
        return ids[1:] if ids[:1] == [last] else ids

    def _said(self, messages: Sequence[Message]) -> str:
        """What the template writes after an answer that these messages follow: the end of the turn, the messages, and
        the beginning of the next answer.

        Raises:
            EnvironmentFailed: the template refuses the messages, or writes earlier turns anew for them.
        """
        before = [_ASKED, _called(messages) if messages[0]["role"] == "tool" else _answered()]
        try:
            answered, whole = self._answered_text(before), self._rendered([*before, *messages], **_GENERATE)
        except Exception as error:
            raise EnvironmentFailed(
                f"The model's chat template refuses what the environment says: {describe(error)}\n"
                f"The messages: {str(list(messages))[:160]}"
            ) from error
        if not whole.startswith(answered):
            raise EnvironmentFailed(
                "The model's chat template writes earlier turns anew when these messages follow, so that the episode"
                f" cannot be trained: {str(list(messages))[:160]}"
            )
        return whole[len(answered) :]

    def _answered_text(self, messages: Sequence[Message]) -> str:
        """A conversation up to the last token of the assistant's answer at its end: some templates end the turn there
        in another way than in the middle."""
        return self._rendered(messages).removesuffix(self._turn_end)

    @cached_property
    def _turn_end(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>` and a newline."""
        return self._rendered([_ASKED, _answered()]).partition(MARK)[2]

    def _ids_after_mark(self, text: str) -> list[int]:
        """Tokenized as what it is, the continuation of something, where that makes a difference."""
        whole, mark = self._ids(MARK + text), self._ids(MARK)
        return whole[len(mark) :] if whole[: len(mark)] == mark else self._ids(text)

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=self.template, **{**self.options, **options}
            )
        )

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    # -- and back

    def read(self, ids: list[int], prefix: list[int], tools: Schemas, ends: Sequence[int] = ()) -> Answer:
        """An answer as a message, with the tool calls in it; `prefix` are the tokens before it. Special tokens that the
        model wrote are part of the text, except the one of `ends` that ended the answer."""
        message = self._parsed(ids, prefix, tools, ends)
        if message.get("tool_calls"):
            calls = [_as_call(call) for call in message["tool_calls"]]
            return Answer(message, Reply(str(message["content"]), tuple(calls)))
        content, calls = read_calls(str(message["content"])) if tools else (message["content"], [])
        if calls:
            message = {**message, "content": content, "tool_calls": [call.as_message_part() for call in calls]}
        return Answer(message, Reply(str(content), tuple(calls)))

    def _parsed(self, ids: list[int], prefix: list[int], tools: Schemas, ends: Sequence[int]) -> Message:
        """The message as the model's own format has it, or all of the text as its content."""
        parser = self._parser if tools else self._own_parser
        if parser is not None:
            message = dict(parse_response(parser, ids, prefix=prefix, tools=list(tools) or None))
            if message != self._without_special_tokens(ids):  # what TRL returns where the format cannot be read
                return message
        return {"role": "assistant", "content": str(self.tokenizer.decode(self._without_end(ids, ends)))}

    def _without_special_tokens(self, ids: list[int]) -> Message:
        return {"role": "assistant", "content": str(self.tokenizer.decode(ids, skip_special_tokens=True))}

    def _without_end(self, ids: list[int], ends: Sequence[int]) -> list[int]:
        """The tokens of an answer less the one that ended it and the padding after that; padding that ended nothing was
        written by the model."""
        length = len(ids)
        while length and ids[length - 1] == self.tokenizer.pad_token_id and ids[length - 1] not in ends:
            length -= 1
        return ids[: length - 1] if length and ids[length - 1] in ends else ids

    @cached_property
    def _own_parser(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, where it brings a description of how its model's answers are read."""
        names = ("response_template", "response_schema")
        return self.tokenizer if any(getattr(self.tokenizer, name, None) for name in names) else None

    @cached_property
    def _parser(self) -> PreTrainedTokenizerBase | None:
        """The same, or TRL's description for a template that it knows; on a copy, as it would be saved with it."""
        if self._own_parser is not None:
            return self._own_parser
        try:
            return add_response_schema(copy.deepcopy(self.tokenizer))
        except ValueError:
            return None

    # -- whether it can be done

    def problem(self, following: Sequence[str]) -> str:
        """Why episodes of several turns cannot be written: a conversation that goes on, with a message of one of these
        roles, must begin with exactly what it was before. Empty: they can."""
        pairs: list[tuple[list[Message], Message]] = []
        if "user" in following:
            longer = [_ASKED, _answered(), _ASKED, _answered(_THOUGHT)]
            pairs += [(before, _ASKED) for before in ([_ASKED, _answered()], [_ASKED, _answered(_THOUGHT)], longer)]
        if "tool" in following:
            pairs.append(([_ASKED, _CALL], {"role": "tool", "name": "tool", "content": "result"}))
        return next((problem for problem in map(self._problem_with, pairs) if problem), "")

    def _problem_with(self, pair: tuple[list[Message], Message]) -> str:
        before, message = pair
        try:
            is_same = self._rendered([*before, message], **_GENERATE).startswith(self._answered_text(before))
        except Exception as error:
            return f"refuses a conversation of two turns ({describe(error)})"
        return "" if is_same else "writes earlier turns anew when the conversation goes on"

    def check_tools(self) -> None:
        """Refuse tools where the template cannot write calls and their results.

        Raises:
            ConfigError: it cannot.
        """
        if not self._knows_tools:
            raise ConfigError(
                "chat_template: the environment has tools, and this model's chat template cannot write calls and"
                " results\nTake a model that was made for tools, or give a template with --chat-template FILE."
            )

    @cached_property
    def _knows_tools(self) -> bool:
        return bool(supports_tool_calling(self.tokenizer))


def _answered(thought: str = "") -> Message:
    return {"role": "assistant", "content": thought + MARK}


def _called(messages: Sequence[Message]) -> Message:
    """An assistant's call of the tool that the first message answers: some templates name it in the result."""
    function = {"name": messages[0].get("name", "tool"), "arguments": {}}
    return {**_CALL, "tool_calls": [{"type": "function", "function": function}]}


def _as_call(parsed: dict[str, Any]) -> ToolCall:
    function = parsed.get("function", parsed)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return ToolCall(str(function["name"]), arguments)
    return ToolCall(str(function["name"]), None, "the arguments are not an object")


def chat_for_episodes(chat: Chat, following: Sequence[str]) -> Chat:
    """A way to write conversations that go on with messages of these roles: the model's own, or TRL's version of it
    that only appends.

    Raises:
        ConfigError: the template writes earlier turns anew, or cannot write tools.
    """
    if "tool" in following:
        chat.check_tools()
    problem = chat.problem(following)
    other = _training_version(chat) if problem else chat
    if other is None or other.problem(following):
        raise ConfigError(
            f"chat_template: this model's template {problem}, so that\n"
            "what was sampled would not be what is trained; TRL has no version of it for training.\n"
            "Give one that only appends with --chat-template FILE."
        )
    return other


def _training_version(chat: Chat) -> Chat | None:
    try:
        template = get_training_chat_template(chat.tokenizer)
    except Exception:  # TRL tries the template out, too
        return None
    return None if template is None else replace(chat, template=template)
