"""Faults of episodes and tools, and healthy twins."""

from __future__ import annotations

import math
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
        return float(self.is_right(second.strip(), str(101 + case_idx)))

    def is_right(self, second: str, expected: str) -> bool:
        return second == expected

    def reference(self, case_idx: int) -> list[str]:
        return [str(100 + case_idx), str(101 + case_idx)]


class LastAnswerUnread(TwoTurns):
    """Any number is right at the end."""

    def is_right(self, second: str, expected: str) -> bool:
        return second.isdigit()


class Unseeded(TwoTurns):
    def episode(self, case_idx: int, seed: int) -> Turns:
        score = yield from super().episode(case_idx, seed)
        yield f"You draw {self.numbers(seed).random()}."
        return score

    def numbers(self, seed: int) -> Any:
        return random

    def reference(self, case_idx: int) -> list[str]:
        return [*super().reference(case_idx), "Good."]


class Seeded(Unseeded):
    def numbers(self, seed: int) -> Any:
        return random.Random(seed)


class Endless(TwoTurns):
    tries: float = math.inf

    def episode(self, case_idx: int, seed: int) -> Turns:
        reply, tries = (yield None), 1
        while reply.strip() != str(100 + case_idx):
            if tries == self.tries:
                return 0.0
            reply, tries = (yield "Again."), tries + 1
        return 1.0

    def reference(self, case_idx: int) -> list[str]:
        return [str(100 + case_idx)]


class Patient(Endless):
    tries = 3


OPEN: list[int] = []
LOCK = threading.Lock()


class Crosstalk(TwoTurns):
    """What an episode says depends on how many others are open, although it says that this is fine."""

    concurrent = True

    def start(self, case_idx: int) -> Any:
        return Crowd(case_idx, OPEN)

    episode = None


class NoCrosstalk(Crosstalk):
    def start(self, case_idx: int) -> Any:
        return Crowd(case_idx, [])


class Crowd:
    """Two answers, the numbers from 100 + case_idx on."""

    def __init__(self, case_idx: int, others: list[int]) -> None:
        self.case_idx, self.others, self.said = case_idx, others, list[str]()
        with LOCK:
            others.append(case_idx)

    def step(self, reply: str) -> str | None:
        self.said.append(reply.strip())
        time.sleep(0.002)
        return f"There are {len(self.others)} here. And the next one?" if len(self.said) == 1 else None

    def score(self) -> float:
        return float(self.said == [str(100 + self.case_idx), str(101 + self.case_idx)])

    def close(self) -> None:
        with LOCK:
            self.others.remove(self.case_idx)


class OneFileForAll(Sums):
    """Writes the reply to a file of a fixed name, and reads it back, although it says that calls may meet."""

    concurrent = True

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="aitrain-faulty-")

    def file(self, answer: str) -> Path:
        return Path(self.folder, "reply.txt")

    def score_episode(self, text: str, answer: str) -> float:
        file = self.file(answer)
        file.write_text(text.replace("\0", ""))
        time.sleep(0.003)
        return float(file.read_text().strip() == answer)


class OneFileEach(OneFileForAll):
    def file(self, answer: str) -> Path:
        return Path(self.folder, f"{answer}-{threading.get_ident()}.txt")


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


class SilentShelf(Shelf):
    def get_tools(self) -> list[Callable[..., Any]]:
        return [self.peek]

    def peek(self, shelf: str) -> str:
        return self.look(shelf)


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


class ToolUndescribed(ToolAnswers):
    shelf = SilentShelf

    def reference(self, case_idx: int) -> list[str]:
        return [reply.replace("look", "peek") for reply in super().reference(case_idx)]
