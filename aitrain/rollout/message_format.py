"""Conversations as messages instead of tokens, for models behind a chat API, and for replies that are written.

A token id stands for a whole message or prompt: it is an index of the format's table. A completion has as many ids as
the API has counted tokens, so that records, limits and token counts are those of any other engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aitrain.environment.completion_parser import THINK, thought_of
from aitrain.environment.contract import Prompt, as_messages
from aitrain.environment.dataset import canonical_text
from aitrain.environment.runner import AbsentModel
from aitrain.environment.session import AssistantTurn, Message
from aitrain.rollout.chat_format import ChatFormat, Schemas
from aitrain.rollout.end_of_turn import EndOfTurn

FILLER = 0
"""Token id without a message."""
END = EndOfTurn([FILLER])
"""That of engines whose completions are messages."""
BEHIND_API = "an address has none"


@dataclass(frozen=True)
class MessageFormat(ChatFormat):
    """A chat format that keeps messages as they are."""

    tokenizer: Any = field(default_factory=lambda: AbsentModel("tokenizer", BEHIND_API))
    has_tool_calls: bool = True
    """The API refuses tools that its model cannot use."""
    parts: list[tuple[Sequence[Message], Schemas]] = field(default_factory=lambda: [((), ())])
    """What the ids stand for: messages, and the tools that they come with."""

    def prompt_text(self, prompt: Prompt, tools: Schemas = ()) -> str:
        """Text that is equal for prompts that look equal to the model."""
        return canonical_text({"prompt": prompt, "tools": list(tools)})

    def render_prompt(self, prompt: Prompt, tools: Schemas = ()) -> tuple[str, list[int]]:
        """One id, for the whole prompt, and no text, as the server renders it; a string is a message of the user."""
        return "", [self._add(as_messages(prompt), tools)]

    def following_ids(self, messages: Sequence[Message], said: list[int], is_chat: bool) -> list[int]:
        """One id, for all messages that follow a completion."""
        if not is_chat:
            messages = [{**message, "role": "user"} for message in messages]
        return [self._add(messages)]

    def read(self, ids: list[int], prefix: list[int], tools: Schemas, eos_ids: Sequence[int] = ()) -> AssistantTurn:
        """The answer that a completion is, with its tool calls."""
        ((message,), _) = self.parts[ids[0]]
        if not tools:
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        thought = thought_of(message)
        has_ended = message["content"] or message.get("tool_calls")
        tagged = f"{THINK.begin}\n{thought}{THINK.ending if has_ended else ''}" if thought else ""
        # a server without a parser of tool calls leaves them in the text
        return self._turn(message, tools, thought, tagged)

    def completion_ids(self, message: Message, tokens: int = 1) -> list[int]:
        """Ids of an answer, as many as its tokens."""
        return [self._add([message]), *[FILLER] * (tokens - 1)]

    def conversation(self, ids: Sequence[int]) -> tuple[list[Message], list[dict[str, Any]]]:
        """The messages and the tools that ids stand for."""
        parts = [self.parts[one] for one in ids if one != FILLER]
        return [one for messages, _ in parts for one in messages], [one for _, tools in parts for one in tools]

    def _add(self, messages: Sequence[Message], tools: Schemas = ()) -> int:
        self.parts.append((messages, tools))
        return len(self.parts) - 1
