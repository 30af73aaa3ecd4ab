"""Two turns, and metrics."""

from __future__ import annotations

from typing import Any

from aitrain import Score

WORDS = {"apple": "fruit", "birch": "tree", "robin": "bird", "trout": "fish", "maple": "tree", "plum": "fruit"}


class DictionaryLookup:
    """Asks for the kind of a word, twice."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """One case a word."""
        return [
            {"prompt": [{"role": "user", "content": f"What is a {word}?"}], "word": word, "kind": kind}
            for word, kind in WORDS.items()
        ]

    def episode(self, word: str, kind: str) -> Any:
        """A second try after a wrong answer."""
        answer = yield None
        if kind in answer:
            return Score(1.0, metrics={"tries": 1})
        answer = yield "Try again."
        return Score(answer.count("1") / max(1, len(answer)), metrics={"tries": 2})
