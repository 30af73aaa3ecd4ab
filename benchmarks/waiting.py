"""The environment of fleet.py and scale.py: episodes of one to three turns, whose calls wait for different times."""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from typing import Any


class Waiting:
    """Waits as for another machine, mostly shortly, and scores the share of letters."""

    def __init__(self, longest: float = 1.0, cases: int = 400) -> None:
        self.longest, self.cases = longest, cases

    def build_dataset(self, tokenizer: Any = None) -> list[dict[str, Any]]:
        """One row per prompt."""
        return [{"prompt": [{"role": "user", "content": f"word {number}"}]} for number in range(self.cases)]

    def episode(self, seed: int) -> Generator[str | None, str, float]:
        """One to three turns; the seed decides how many, and how long each of its calls waits."""
        chance = random.Random(seed)
        turns = chance.randint(1, 3)
        answer = yield None
        for _ in range(turns - 1):
            time.sleep(self.longest * chance.random() ** 2)
            answer = yield "more?"
        time.sleep(self.longest * chance.random() ** 2)
        return sum(letter.isascii() and letter.isalpha() for letter in answer) / max(1, len(answer))
