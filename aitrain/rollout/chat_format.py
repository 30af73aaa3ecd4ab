"""The chat format of a model: prompts and environment messages as tokens, completions as messages.

Tokens are only appended: the environment's messages are rendered as the difference of two renderings of the chat
template, so that no earlier token changes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from aitrain import activity
from aitrain.environment.completion_parser import (
    ThoughtTags,
    ToolCall,
    clean,
    parse_call,
    read_calls,
    thought_of,
)
from aitrain.environment.contract import Prompt
from aitrain.environment.session import AssistantTurn, Message
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.execution.user_code import describe_error
from aitrain.options.generation import Thinking

MARK = "answer7e1f"
"""Placeholder for a completion in renderings that determine what follows it."""

QUESTION: Message = {"role": "user", "content": "question"}
_GENERATE = {"add_generation_prompt": True}
_THOUGHT = "<think>\nso\n</think>\n\n"
Schemas = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ChatFormat:
    """Renders and parses the conversations of one model; `template` is None for the tokenizer's own."""

    tokenizer: Any
    """That of transformers, or one with its `encode`, `decode` and `apply_chat_template`."""
    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Additional template variables (`--trl chat_template_kwargs=...`)."""
    training_template: str | None = None
    """A prefix-preserving version of the template; None if there is none."""
    has_tool_calls: bool = False
    """Whether the template writes tool calls and their results."""
    parse: Callable[[list[int], list[int], Schemas], Message | None] = lambda *_: None
    """A completion, after a prefix and with tools, as a message, parsed in the model's format of thoughts and tool
    calls; None if unknown."""
    thoughts: ThoughtTags | None = None
    """What begins and ends a thought; None: completions are answers as a whole."""
    thinking: Thinking | None = None
    """The thinking that is asked for; None: the template's own."""
    keeps_thoughts: bool = False
    """Whether the text of an answer has its thought."""

    # -- to tokens

    def prompt_text(self, prompt: Prompt, tools: Schemas = ()) -> str:
        """The rendered prompt; fails as `render` does."""
        return prompt if isinstance(prompt, str) else self.render(prompt, tools=list(tools) or None, **_GENERATE)

    def prompt_ids(self, prompt: Prompt, tools: Schemas = ()) -> list[int]:
        """Tokens of the prompt; special tokens are added to string prompts only, as a chat template has its own."""
        return self.render_prompt(prompt, tools)[1]

    def render_prompt(self, prompt: Prompt, tools: Schemas = ()) -> tuple[str, list[int]]:
        """The prompt as text and as its tokens."""
        activity.tick()
        key = repr((prompt, tools))
        text, ids = self._last_prompt.get(key, ("", None))
        if ids is None:
            text = self.prompt_text(prompt, tools)
            ids = self._ids(text, add_special_tokens=isinstance(prompt, str))
            self._last_prompt.clear()
            self._last_prompt[key] = text, ids
        return text, list(ids)

    @cached_property
    def _last_prompt(self) -> dict[str, tuple[str, list[int]]]:
        """The prompt that was rendered last: the completions of a group have the same."""
        return {}

    def following_ids(self, messages: Sequence[Message], said: list[int], is_chat: bool) -> list[int]:
        """Tokens to append after a completion, of which `said` is the end.

        These are the end of the assistant's turn, without the token that the policy sampled, the messages, and the
        start of the next assistant turn.
        """
        if not is_chat:
            return self._ids("".join(str(message["content"]) for message in messages))
        text = self._rendered_response(messages)
        # a tokenizer may split a text differently at its start
        ids, mark = self._ids(MARK + text), self._ids(MARK)
        ids = ids[len(mark) :] if ids[: len(mark)] == mark else self._ids(text)
        return ids[1:] if ids[:1] == said[-1:] else ids

    def _rendered_response(self, messages: Sequence[Message]) -> str:
        """What the template renders after a completion followed by these messages: end of turn, messages, next turn.

        Raises:
            EnvironmentFailed: the template raises for the messages, or is not prefix-preserving for them.
        """
        first = messages[0]  # some templates name the tool in the result
        answer = _tool_call(first.get("name", "tool")) if first["role"] == "tool" else _assistant_message()
        whole = self.render([QUESTION, answer, *messages], **_GENERATE)
        before = self._rendered_without_end([QUESTION, answer])
        if not whole.startswith(before):
            raise EnvironmentFailed(
                "The model's chat template is not prefix-preserving when these messages follow, so that the episode"
                f" cannot be trained: {str(list(messages))[:160]}"
            )
        return whole[len(before) :]

    def _rendered_without_end(self, messages: Sequence[Message]) -> str:
        """A rendered conversation without the end of its last turn, which some templates render in a special way."""
        return self.render(messages).removesuffix(self._turn_end)

    @cached_property
    def _turn_end(self) -> str:
        """What the template renders after a completion, such as `<|im_end|>` and a newline."""
        return self.render([QUESTION, _assistant_message()]).partition(MARK)[2]

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation by the chat template, with these variables.

        Raises:
            EnvironmentFailed: the template raises for the messages.
        """
        options = {**self.options, **options}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, chat_template=self.template, **options
                )
            )
        except Exception as error:
            raise EnvironmentFailed(
                f"The model's chat template refuses a conversation: {describe_error(error)}\n"
                f"Its last message: {str(messages[-1:])[:160]}"
            ) from error

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(clean(text), add_special_tokens=add_special_tokens)
        return ids

    # -- and back

    def read(self, ids: list[int], prefix: list[int], tools: Schemas, eos_ids: Sequence[int] = ()) -> AssistantTurn:
        """Parse a completion into an answer with tool calls, its thought apart; `prefix` are the tokens before it.
        Special tokens are part of the text, except the token of `eos_ids` that ended the completion."""
        message = self.parse(ids, prefix, tools)
        whole = ids[:-1] if ids and ids[-1] in eos_ids else ids
        thought, answer = self.split_thought(whole, prefix)
        if self.thoughts is not None and answer is not None:
            answer = answer.removeprefix(self.thoughts.header)
        if message is None or answer is None:  # what is called inside a thought is no call
            message = {"content": answer or ""}
        tagged = str(self.tokenizer.decode(whole)).removesuffix(answer or "") if thought else ""
        return self._turn(message, tools, thought or thought_of(message), tagged)

    def _turn(self, message: Message, tools: Schemas, thought: str, tagged: str) -> AssistantTurn:
        """An answer, whose tool calls may be in its text. `tagged`: its thought with its tags."""
        content, calls = str(message["content"]), list[ToolCall]()
        if message.get("tool_calls"):
            calls = [parse_call(call.get("function") or call) for call in message["tool_calls"]]
        elif tools:
            content, calls = read_calls(content)
        if self.keeps_thoughts and tagged:
            content, thought = tagged + content, ""
        return AssistantTurn(clean(content), tuple(calls), thought)

    # -- thoughts

    def split_thought(self, ids: list[int], prefix: list[int]) -> tuple[str, str | None]:
        """The thought that a completion begins with, and its answer, None if the thought does not end. The template may
        have begun the thought, at the end of the prefix."""
        tags, text = self.thoughts, str(self.tokenizer.decode(ids))
        if tags is None:
            return "", text
        last = str(self.tokenizer.decode(prefix[-len(tags.begin) - 2 :]))  # a token has a character at least
        return tags.split(text, is_open=last.rstrip().endswith(tags.begin))

    def thought_tokens(self, ids: list[int], prefix: list[int]) -> int | None:
        """Tokens of the thought that a completion begins with, its end included; None if it does not end."""
        tags, (_, answer) = self.thoughts, self.split_thought(ids, prefix)
        if tags is None or answer == self.tokenizer.decode(ids):
            return 0
        if answer is None:
            return None
        return bisect_left(range(len(ids)), True, key=lambda count: tags.end in self.tokenizer.decode(ids[:count]))

    # -- checks of the template

    def problem(self, following: Sequence[str]) -> str:
        """Why the template cannot render multi-turn episodes; empty if it can.

        When a message of one of the roles in `following` is added, the rendering must start with the previous one.
        """
        asked, thought = [QUESTION, _assistant_message()], [QUESTION, _assistant_message(_THOUGHT)]
        result: Message = {"role": "tool", "name": "tool", "content": "result"}
        befores = {"user": [asked, thought, asked + thought], "tool": [[QUESTION, _tool_call("tool")]]}
        try:
            for role in following:
                for before in befores[role]:
                    whole = self.render([*before, QUESTION if role == "user" else result], **_GENERATE)
                    if not whole.startswith(self._rendered_without_end(before)):
                        return "is not prefix-preserving: it renders earlier turns differently later"
        except EnvironmentFailed as error:
            return f"refuses a conversation of two turns ({describe_error(error.__cause__ or error)})"
        return ""

    def drops_system(self) -> bool:
        """Whether the template leaves out a system message, without an error."""
        try:
            text = self.render([{"role": "system", "content": MARK}, QUESTION])
        except EnvironmentFailed:  # as the prompt of an episode will
            return False
        return MARK not in text

    def check_tools(self, is_chat: bool = True) -> None:
        """Check that the template can render tool calls and their results.

        Raises:
            ConfigError: it cannot, or the prompts are strings, which have no template.
        """
        if not is_chat:
            raise ConfigError(
                "The environment has tools that are methods (get_tools), and prompts that are strings: no chat template"
                "\nshows the model its tools. Let build_dataset return chat messages:"
                ' [{"role": "user", "content": "..."}]'
            )
        if not self.has_tool_calls:
            raise ConfigError(
                "chat_template: the environment has tools, and this model's chat template cannot write calls and"
                " results\nUse a model that was trained with tools, or give a template with --chat-template FILE."
            )


def _assistant_message(thought: str = "") -> Message:
    return {"role": "assistant", "content": thought + MARK}


def _tool_call(name: str) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(name).as_message_part()]}


def format_for_episodes(chat: ChatFormat, following: Sequence[str]) -> ChatFormat:
    """The chat format for conversations that continue with messages of these roles: the model's, or TRL's
    prefix-preserving version of it.

    Raises:
        ConfigError: the template is not prefix-preserving, or cannot render tools.
    """
    if "tool" in following:
        chat.check_tools()
    if not (problem := chat.problem(following)):
        return chat
    other = replace(chat, template=chat.training_template)
    if other.template is None or other.problem(following):
        raise ConfigError(
            f"chat_template: this model's template {problem}, so that\n"
            "the trained tokens would differ from the sampled ones; TRL has no version of it for training.\n"
            "Give a prefix-preserving one with --chat-template FILE."
        )
    return other
