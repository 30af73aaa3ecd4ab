"""Environments that fail, for the tests of failures."""

from __future__ import annotations

import itertools
from typing import Any


class Gone:
    """Works for the held-out cases, if at all, and in training for a number of calls."""

    def __init__(self, calls: int = 0, held_out: bool = True) -> None:
        self.calls, self.held_out = calls, held_out
        self.numbers = itertools.count()

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}"} for number in range(24)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "say it", "case_idx": -1}]

    def score_episode(self, completion: str, case_idx: int) -> float:
        works = next(self.numbers) < self.calls if case_idx >= 0 else self.held_out
        if not works:
            raise RuntimeError("the board is gone")
        return len(completion) % 5 / 5
