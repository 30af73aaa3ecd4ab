"""Two turns with a tool, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aitrain import Score

WORDS = {"apple": "fruit", "birch": "tree", "robin": "bird", "trout": "fish", "maple": "tree", "plum": "fruit"}


class DictionaryLookup:
    """Asks for the kind of a word; a tool knows it."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """One case a word."""
        return [
            {"prompt": [{"role": "user", "content": f"What is a {word}?"}], "word": word, "kind": kind}
            for word, kind in WORDS.items()
        ]

    def get_tools(self) -> list[Callable[..., str]]:
        """The dictionary."""

        def look_up(word: str) -> str:
            """Look up a word.

            Args:
                word: the word
            """
            return WORDS[word]

        return [look_up]

    def episode(self, word: str, kind: str) -> Any:
        """An example of a call first; a second try after a wrong answer."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "oak"}}}
        answer = yield [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look_up", "content": "tree"},
            {"role": "user", "content": "Now yours."},
        ]
        if kind in answer:
            return Score(1.0, metrics={"tries": 1})
        answer = yield "Try again."
        return Score(answer.count("1") / max(1, len(answer)), metrics={"tries": 2})
