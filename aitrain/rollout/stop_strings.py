"""Stop strings: texts that end a completion with the token that completes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXTRA_TOKENS = 8
"""Tokens decoded in addition to those that can hold a stop string, as some tokenizers decode the first ones of a text
differently."""


@dataclass(frozen=True)
class StopStrings:
    """Finds stop strings at the end of a completion, as vLLM does: in the text of its tokens, special ones included."""

    tokenizer: Any
    texts: Sequence[str]
    min_tokens: int = 0
    """Completions of at most this many tokens are not ended."""

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the newest token of a completion completes a stop string."""
        if len(ids) <= self.min_tokens:
            return False
        tail = list(ids[-self._window :])
        text = self._decode(tail)
        before = len(self._decode(tail[:-1]))
        return any(stop in text[max(0, before - len(stop) + 1) :] for stop in self.texts)

    @property
    def _window(self) -> int:
        """Number of tokens that can hold the longest stop string, as each token has at least one byte."""
        return max(len(text.encode()) for text in self.texts) + EXTRA_TOKENS

    def _decode(self, ids: list[int]) -> str:
        """The text without an incomplete character at its end."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")
