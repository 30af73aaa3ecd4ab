"""What TRL knows of chat templates: versions for training, tool calls, and how completions are parsed.

Where this depends on the inside of TRL 1.16 (tests/training/test_upstream.py):

    trl.chat_template_utils.parse_response      returns the decoded text as it is where it cannot parse
"""

from __future__ import annotations

import copy
from functools import cached_property

from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import chat_template_utils

from aitrain.environment.session import Message
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat, Schemas, TemplateSupport
from aitrain.rollout.thinking import with_thinking


def chat_format(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> ChatFormat:
    """The format of a model's conversations, with what TRL knows of its template, and the thinking of the options.

    Raises:
        ConfigError: the template does not offer this thinking.
    """
    options = config.trl_table("chat_template_kwargs")
    chat = ChatFormat(tokenizer, options=options, support=TRLTemplateSupport(tokenizer))
    return with_thinking(chat, config.thinking)


class TRLTemplateSupport(TemplateSupport):
    """TRL's templates and response formats for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def training_template(self) -> str | None:
        """TRL's prefix-preserving version of the template; None if it has none."""
        try:
            template: str | None = chat_template_utils.get_training_chat_template(self._tokenizer)
        except Exception:  # TRL renders the template to compare it
            return None
        return template

    @cached_property
    def has_tool_calls(self) -> bool:
        """Whether the template writes tool calls and their results."""
        return bool(chat_template_utils.supports_tool_calling(self._tokenizer))

    def parse(self, ids: list[int], prefix: list[int], tools: Schemas) -> Message | None:
        """A completion, parsed in the model's format; None if there is no format, or the completion does not match."""
        parser = self._parser if tools else self._own_parser
        if parser is None:
            return None
        message = dict(chat_template_utils.parse_response(parser, ids, prefix=prefix, tools=list(tools) or None))
        unparsed = {"role": "assistant", "content": str(self._tokenizer.decode(ids, skip_special_tokens=True))}
        return None if message == unparsed else message

    @cached_property
    def _own_parser(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, if it describes how its model's completions are parsed."""
        names = ("response_template", "response_schema")
        return self._tokenizer if any(getattr(self._tokenizer, name, None) for name in names) else None

    @cached_property
    def _parser(self) -> PreTrainedTokenizerBase | None:
        """The same, or a copy of the tokenizer with TRL's response format, which must not be saved with the model."""
        if self._own_parser is not None:
            return self._own_parser
        try:
            parser: PreTrainedTokenizerBase = chat_template_utils.add_response_schema(copy.deepcopy(self._tokenizer))
        except ValueError:
            return None
        return parser
