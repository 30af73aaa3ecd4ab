"""What the model sees: prompts and messages, rendered with the chat template of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aitrain.environment.contract import Prompt
from aitrain.environment.session import Message
from aitrain.rollout.chat_format import ChatFormat, Schemas


@dataclass(frozen=True)
class RenderedText:
    """A piece of a conversation as the model gets it."""

    text: str
    tokens: int


@dataclass(frozen=True)
class ModelView:
    """Renders conversations as in training; `name` is the model whose template and tokens these are."""

    chat: ChatFormat
    name: str
    tokenizer: object
    """What environments get as their `tokenizer`."""

    def prompt(self, prompt: Prompt, tools: Schemas) -> RenderedText:
        """The conversation before the first answer.

        Raises:
            EnvironmentFailed: the chat template refuses it.
        """
        return RenderedText(self.chat.prompt_text(prompt, tools), len(self.chat.prompt_ids(prompt, tools)))

    def following(self, messages: Sequence[Message], is_chat: bool) -> RenderedText:
        """What comes between an answer and the next one.

        Raises:
            EnvironmentFailed: the chat template refuses it.
        """
        ids = self.chat.following_ids(messages, -1, is_chat)
        return RenderedText(str(self.chat.tokenizer.decode(ids, skip_special_tokens=False)), len(ids))
