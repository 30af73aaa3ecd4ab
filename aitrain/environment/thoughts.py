"""Thoughts: what a model says before its answer, between the tags of its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

THOUGHT_KEYS = ("reasoning_content", "thinking")
"""Names under which messages have a thought apart from their content; ours is the first."""


@dataclass(frozen=True)
class ThoughtTags:
    """What begins and what ends a thought, and the text that is appended to one that must end."""

    begin: str
    end: str
    ending: str

    def split(self, text: str, is_open: bool = False) -> tuple[str, str | None]:
        """The thought that a text begins with, and the answer, None if the thought does not end. `is_open`: the text
        continues a thought."""
        said = text.lstrip()
        if not is_open and not said.startswith(self.begin):
            return "", text
        thought, end, answer = said.removeprefix(self.begin).partition(self.end)
        return thought.strip(), answer.lstrip() if end else None


THINK = ThoughtTags("<think>", "</think>", "\n</think>\n\n")
_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
KNOWN_TAGS = (
    THINK,  # Qwen3, SmolLM3, DeepSeek-R1, GLM, Nemotron, LFM2.5
    ThoughtTags("<|channel|>analysis<|message|>", _FINAL, _FINAL),  # GPT-OSS
    ThoughtTags("<|channel>thought", "<channel|>", "\n<channel|>"),  # Gemma 4
)


def thought_of(message: Mapping[str, Any]) -> str:
    """The thought of a message, empty without one."""
    return next((str(message[key]) for key in THOUGHT_KEYS if message.get(key)), "")


def without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its thought."""
    return {name: value for name, value in message.items() if name not in THOUGHT_KEYS}
