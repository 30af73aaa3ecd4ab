"""Environments whose episodes are compared in groups, begin with what the environment says, or have no room."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from aitrain import EnvRequirements, Score, ToolCall


class Ranked:
    """Speaks first, without any prompts; compares the answers of a group; notes who closed it. Case 2 has no room."""

    requirements = EnvRequirements(max_new_tokens=4, max_turns=2)

    def __init__(self, notes: str, opened: bool = True) -> None:
        self.notes, self.opened = Path(notes), opened

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"word": f"word {number}", "length": 100_000 if number == 2 else 1} for number in range(6)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"word": f"held {number}", "length": 100_000 if number == 2 else 1} for number in range(3)]

    def episode(self, word: str, length: int) -> Generator[str, str, float]:
        reply = yield f"Say {word}{'!' * length}"
        return len(reply) % 5 / 5

    def score_group(self, texts: list[str], scores: list[float], word: str) -> list[Score]:
        order = sorted(scores)
        return [
            Score(
                order.index(own) / len(scores),
                {"size": len(texts), "own": own, "pid": os.getpid(), "hash": hash("aitrain") % 1000},
            )
            for own in scores
        ]

    def close(self) -> None:
        (self.notes / f"closed-by-{os.environ.get('RANK', '0')}-{os.getpid()}").touch()


class Moves:
    """A game whose steps get the calls, and whose tool schemas name no method."""

    requirements = EnvRequirements(max_turns=3, score_range=(-1, 1))

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"case_idx": number} for number in range(12)]

    def start(self, case_idx: int) -> Moving:
        return Moving(case_idx)


class Moving:
    def __init__(self, number: int) -> None:
        self.number, self.calls = number, list[ToolCall]()

    def get_tools(self) -> list[dict[str, Any]]:
        return [{"name": "move", "description": "Go there.", "parameters": {"type": "object", "properties": {}}}]

    async def opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Move."}, {"role": "user", "content": f"You are at {self.number}."}]

    def step(self, reply: str, calls: list[ToolCall]) -> str:
        self.calls += calls
        return "moved" if calls else "use the tool"

    def score(self) -> Score:
        return Score(-1 + len(self.calls) / 2, {"calls": len(self.calls)})
