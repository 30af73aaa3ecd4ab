"""Write a text backwards, character by character."""

import random
from difflib import SequenceMatcher
from typing import Any

TEXT = """
amber basket candle dinner engine forest garden harbor island jacket kettle ladder market needle orange pepper
quartz ribbon silver tunnel umbrella velvet window yellow zipper bridge copper desert feather guitar
"""
WORDS = TEXT.split()


class ReverseText:
    """Gives the similarity of the answer and the reversed text, 1.0 for equality."""

    def __init__(self, cases: int = 1000, words: int = 6, seed: int = 0) -> None:
        chosen = random.Random(seed)
        self.texts = [" ".join(chosen.choices(WORDS, k=words)) for _ in range(cases)]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per text."""
        ask = "Write the text backwards, character by character, between <reversed> and </reversed>:\n"
        return [{"prompt": [{"role": "user", "content": ask + text}], "answer": text[::-1]} for text in self.texts]

    def score_episode(self, text: str, answer: str) -> float:
        """The similarity of the last part between the tags."""
        inner = text.rpartition("<reversed>")[2].partition("</reversed>")[0].strip() if "<reversed>" in text else ""
        return SequenceMatcher(None, inner[: 4 * len(answer)], answer, autojunk=False).ratio() if inner else 0.0

    def reference(self, case_idx: int) -> str:
        """The right answer."""
        return f"<reversed>{self.texts[case_idx][::-1]}</reversed>"
