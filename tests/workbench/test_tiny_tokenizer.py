"""The bundled tokenizer without transformers renders and encodes as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from aitrain.environment.function_tool import tool_of_function
from aitrain.jobs.tiny_tokenizer import FOLDER, TinyTokenizer


def add(first: int, second: int = 2) -> int:
    """Add <two> & "more" numbers.

    Args:
        first: Größe
    """
    return first + second


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "38 + 47 = ?"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": "Ü <b> & 'x'\n\n"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"first": 1}}}],
        },
        {"role": "tool", "name": "add", "content": "3"},
    ],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [tool_of_function(add).schema]])
@pytest.mark.parametrize("generate", [False, True])
def test_conversations_are_rendered_alike(conversation: list[Any], tools: list[Any] | None, generate: bool) -> None:
    options = {"tokenize": False, "tools": tools, "add_generation_prompt": generate, "chat_template": None}
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    assert TinyTokenizer().apply_chat_template(conversation, **options) == theirs.apply_chat_template(
        conversation, **options
    )


@pytest.mark.parametrize("text", ["38 + 47 = ?", "Ü\n\t<|im_start|>user\n", "", "\u202e🙂<|endoftext|>"])
def test_texts_are_encoded_and_decoded_alike(text: str) -> None:
    ours, theirs = TinyTokenizer(), AutoTokenizer.from_pretrained(FOLDER)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    for special in (False, True):
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
