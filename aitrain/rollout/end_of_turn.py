"""What ends a completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXTRA_TOKENS = 8
"""Tokens decoded in addition to those that can hold a stop string, as some tokenizers decode the first ones of a text
differently."""


@dataclass(frozen=True)
class EndOfTurn:
    """Tells a completion that the policy ended from one that was cut off."""

    eos_ids: Sequence[int]
    """Token ids that end a completion; the first one also fills a trajectory that would be empty."""
    stop: Sequence[str] = ()
    """Stop strings, which are found as by vLLM: in the text of the tokens, special ones included."""
    tokenizer: Any = None
    """Needed with stop strings."""

    def is_reached(self, ids: Sequence[int]) -> bool:
        """Whether the last token of a completion ends it, or completes a stop string."""
        if not ids or ids[-1] in self.eos_ids or not self.stop:
            return bool(ids) and ids[-1] in self.eos_ids
        # the tokens that can hold the longest stop string, as each token has at least one byte
        tail = list(ids[-max(len(text.encode()) for text in self.stop) - EXTRA_TOKENS :])
        text = self._decode(tail)
        before = len(self._decode(tail[:-1]))
        return any(stop in text[max(0, before - len(stop) + 1) :] for stop in self.stop)

    def _decode(self, ids: list[int]) -> str:
        """The text without an incomplete character at its end."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")
