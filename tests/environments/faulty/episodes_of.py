"""Faults of episodes and tools, and healthy environments beside them."""

from __future__ import annotations

import random
import tempfile
import threading
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
LOCK = threading.Lock()


class Crosstalk(TwoTurns):
    """What an episode says depends on how many others are open, although it says that this is fine."""

    concurrent = True

    def start(self, case_idx: int) -> Any:
        return Crowd(case_idx)

    episode = None


class Crowd:
    """Two answers, the numbers from 100 + case_idx on."""

    def __init__(self, case_idx: int) -> None:
        self.case_idx, self.said = case_idx, list[str]()
        with LOCK:
            OPEN.append(case_idx)

    def step(self, reply: str) -> str | None:
        self.said.append(reply.strip())
        time.sleep(0.002)
        return f"There are {len(OPEN)} here. And the next one?" if len(self.said) == 1 else None

    def score(self) -> float:
        return float(self.said == [str(100 + self.case_idx), str(101 + self.case_idx)])

    def close(self) -> None:
        with LOCK:
            OPEN.remove(self.case_idx)


class OneFileForAll(Sums):
    """Writes the reply to a file of a fixed name, and reads it back, although it says that calls may meet."""

    concurrent = True

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp(prefix="aitrain-faulty-"), "reply.txt")

    def score_episode(self, text: str, answer: str) -> float:
        self.file.write_text(text.replace("\0", ""))
        time.sleep(0.003)
        return float(self.file.read_text().strip() == answer)


class Shelf:
    """An environment with a tool, for one episode."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, False
        self.shelves = {"top": "empty", "bottom": f"the number {number}"}

    def get_tools(self) -> list[Callable[..., Any]]:
        return [self.look]

    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: top or bottom
        """
        self.seen = True
        return self.seen_on(shelf)

    def seen_on(self, shelf: str) -> str:
        return self.shelves.get(shelf, "There is no such shelf.")

    def step(self, reply: str) -> None:
        self.said = reply.strip()

    def score(self) -> float:
        return float(self.seen and getattr(self, "said", "") == str(self.number))


class RaisingShelf(Shelf):
    def seen_on(self, shelf: str) -> str:
        return self.shelves[shelf]


class ToolAnswers:
    shelf: type[Shelf] = Shelf

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": f"Number of box {n}?"}]} for n in range(20)]

    def start(self, case_idx: int) -> Shelf:
        return self.shelf(1000 + 7 * case_idx)

    def reference(self, case_idx: int) -> list[str]:
        call = '<tool_call>{"name": "look", "arguments": {"shelf": "bottom"}}</tool_call>'
        return [call, str(1000 + 7 * case_idx)]


class ToolRaises(ToolAnswers):
    shelf = RaisingShelf
