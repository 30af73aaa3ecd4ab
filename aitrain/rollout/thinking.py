"""Switches a model's thinking on and off, by the variables of its chat template.

What a template offers is found by rendering it: a variable that changes nothing is not known to it.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from aitrain.environment.completion_parser import KNOWN_TAGS, THOUGHT_KEYS, ThoughtTags, ToolCall
from aitrain.environment.session import Message
from aitrain.errors import ConfigError
from aitrain.options.generation import Thinking
from aitrain.rollout.chat_format import QUESTION, ChatFormat

LEVELS, BUDGET = ("low", "medium", "high"), "a number of tokens"
ON = {"enable_thinking": True, "thinking": True}
VARIABLES: dict[str, dict[str, Any]] = {
    "on": ON,
    "off": dict.fromkeys(ON, False),
    **{level: {**ON, "reasoning_effort": level} for level in LEVELS},
}
"""The variables of templates for each value of `--thinking`, under all names that are in use."""
THOUGHTFUL = {"role": "assistant", "content": "answer", **dict.fromkeys(THOUGHT_KEYS, "thought")}
THOUGHTFUL_CALL = {**THOUGHTFUL, "tool_calls": [ToolCall("tool").as_message_part()]}
"""Gemma 4's first templates write a thought before calls only."""


def template_variables(thinking: object) -> dict[str, Any]:
    """The variables for a value of `--thinking`, those of `on` for a budget; none without one."""
    return {} if thinking is None else VARIABLES.get(str(thinking), ON)


def rendered(chat: ChatFormat, *messages: Message, **variables: Any) -> str:
    """A question with a generation prompt, or with an answer; empty if the template raises for the variables."""
    with suppress(Exception):
        return chat.render([QUESTION, *messages], **variables, add_generation_prompt=not messages)
    return ""


def thought_tags(chat: ChatFormat) -> ThoughtTags | None:
    """The tags of thoughts in what the template renders; None if it has none."""
    answers = rendered(chat, THOUGHTFUL), rendered(chat, THOUGHTFUL_CALL)
    texts = (*answers, rendered(chat), rendered(chat, **VARIABLES["off"]))
    return next((tags for tags in KNOWN_TAGS if any(tags.begin in text for text in texts)), None)


def offered_thinking(chat: ChatFormat) -> list[str]:
    """The values of `--thinking` that the chat template knows."""
    texts = {value: rendered(chat, **variables) for value, variables in VARIABLES.items()}
    has_thoughts = chat.thoughts is not None
    switch = ["on", "off"] if texts["on"] != texts["off"] else ["on"] * has_thoughts
    levels = [level for level in LEVELS if texts[level]] if texts["low"] != texts["high"] else []
    return [*switch, *levels, *[BUDGET] * has_thoughts]


def with_thinking(chat: ChatFormat, thinking: Thinking | None) -> ChatFormat:
    """The chat format with the tags of its thoughts, and with the thinking that is asked for.

    Raises:
        ConfigError: the chat template does not offer it.
    """
    chat = replace(chat, thoughts=thought_tags(chat))
    if thinking is None:
        return chat
    offered = offered_thinking(chat)
    if (BUDGET if isinstance(thinking, int) else thinking) not in offered:
        raise ConfigError(
            f"thinking: {thinking} is not known to this model's chat template, which has"
            f" {', '.join(offered) or 'no thinking'}"
        )
    return replace(chat, options={**chat.options, **template_variables(thinking)}, thinking=thinking)
