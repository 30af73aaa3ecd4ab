"""What TRL knows of chat templates: versions for training, tool calls, and how completions are parsed.

Where this depends on the inside of TRL 1.16 (tests/training/test_upstream.py):

    trl.chat_template_utils.parse_response      returns the decoded text as it is where it cannot parse
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import chat_template_utils

from aitrain.environment.session import Message
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat, Schemas
from aitrain.rollout.thinking import with_thinking


def chat_format(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> ChatFormat:
    """The format of a model's conversations, with what TRL knows of its template, and the thinking of the options.

    Raises:
        ConfigError: the template does not offer this thinking.
    """
    template = None
    with suppress(Exception):  # TRL renders the template to compare it
        template = chat_template_utils.get_training_chat_template(tokenizer)
    chat = ChatFormat(
        tokenizer,
        options=config.trl_table("chat_template_kwargs"),
        training_template=template,
        has_tool_calls=bool(chat_template_utils.supports_tool_calling(tokenizer)),
        parse=parser_of(tokenizer),
    )
    return with_thinking(chat, config.thinking)


def parser_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int], list[int], Schemas], Message | None]:
    """Parses completions in the model's format; None if there is no format, or a completion does not match."""
    names = ("response_template", "response_schema")
    own = tokenizer if any(getattr(tokenizer, name, None) for name in names) else None

    @cache
    def with_tools() -> PreTrainedTokenizerBase | None:
        """The same, or a copy of the tokenizer with TRL's response format, which must not be saved with the model."""
        with suppress(ValueError):
            return chat_template_utils.add_response_schema(copy.deepcopy(tokenizer)) if own is None else own
        return None

    def parse(ids: list[int], prefix: list[int], tools: Schemas) -> Message | None:
        parser = with_tools() if tools else own
        if parser is None:
            return None
        message = dict(chat_template_utils.parse_response(parser, ids, prefix=prefix, tools=list(tools) or None))
        unparsed = {"role": "assistant", "content": str(tokenizer.decode(ids, skip_special_tokens=True))}
        return None if message == unparsed else message

    return parse
