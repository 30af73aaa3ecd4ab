"""Faults of episodes and tools, and healthy environments beside them."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from sums import Sums

Turns = Generator[str | None, str, float]


class TwoTurns:
    """Asks for a number, and then for the next one."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [
            {"prompt": [{"role": "user", "content": f"Say the number after {number}."}]} for number in range(99, 119)
        ]

    def episode(self, case_idx: int, seed: int) -> Turns:
        first = yield None
        if first.strip() != str(100 + case_idx):
            return 0.0
        second = yield "And the next one?"
        return float(second.strip() == str(101 + case_idx))

    def reference(self, case_idx: int) -> list[str]:
        return [str(100 + case_idx), str(101 + case_idx)]


class Unseeded(TwoTurns):
    def episode(self, case_idx: int, seed: int) -> Turns:
        score = yield from super().episode(case_idx, seed)
        yield f"You draw {random.SystemRandom().random()}."
        return score

    def reference(self, case_idx: int) -> list[str]:
        return [*super().reference(case_idx), "Good."]


class Endless(TwoTurns):
    def episode(self, case_idx: int, seed: int) -> Turns:
        reply = yield None
        while reply.strip() != str(100 + case_idx):
            reply = yield "Again."
        return 1.0

    def reference(self, case_idx: int) -> list[str]:
        return [str(100 + case_idx)]


OPEN: list[int] = []
SHELVES = {"top": "empty", "bottom": "full"}
LOOKS: list[str] = []


class Crosstalk(TwoTurns):
    """What an episode says depends on how many others are open, although it says that this is fine."""

    concurrent = True

    def episode(self, case_idx: int, seed: int) -> Turns:
        OPEN.append(case_idx)
        try:
            first = yield None
            time.sleep(0.002)
            second = yield f"There are {len(OPEN)} here. And the next one?"
            return float([first.strip(), second.strip()] == self.reference(case_idx))
        finally:
            OPEN.remove(case_idx)


class OneFileForAll(Sums):
    """Writes the reply to a file of a fixed name, and reads it back, although it says that calls may meet."""

    concurrent = True

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp(prefix="aitrain-faulty-"), "reply.txt")

    def score_episode(self, text: str, answer: str) -> float:
        self.file.write_text(text.replace("\0", ""))
        time.sleep(0.003)
        return float(self.file.read_text().strip() == answer)


class ToolAnswers(Sums):
    """A shelf may be looked at before the answer."""

    def get_tools(self) -> list[Callable[..., Any]]:
        return [self.look]

    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: top or bottom
        """
        return SHELVES.get(shelf, "There is no such shelf.")


class ToolRemembers(ToolAnswers):
    def look(self, shelf: str) -> str:
        """Look at a shelf."""
        LOOKS.append(shelf)
        return f"You look for the {len(LOOKS)}th time."


class ToolRaises(ToolAnswers):
    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: top or bottom
        """
        return SHELVES[shelf]
