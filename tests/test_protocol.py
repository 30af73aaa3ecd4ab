"""The types of an environment, as a type checker sees them in a user's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
from collections.abc import Generator
from typing import Any

import pytest

import aitrain


class Capitals:
    def build_dataset(self, tokenizer: Any) -> list[dict[str, str]]:
        return [{"prompt": "Capital of France? ", "answer": "Paris"}]

    def score_episode(self, completion: str, answer: str) -> float:
        return float(completion == answer)


class Basket:
    requirements = aitrain.EnvRequirements(max_turns=4)

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def opening(self) -> str:
        return f"Spend {self.budget}."

    async def step(self, reply: str, calls: list[aitrain.ToolCall]) -> str | None:
        return calls[0].name if calls else None

    def score(self) -> aitrain.Score:
        return aitrain.Score(1.0)


class Shop(aitrain.Environment):
    async def build_dataset(self) -> list[dict[str, Any]]:
        return [{"budget": 3}]

    def start(self, budget: int) -> aitrain.SpeakingFirst:
        return Basket(budget)


class Guess:
    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"word": "fig"}]

    def episode(self, word: str) -> aitrain.EpisodeGenerator:
        reply = yield "Guess."
        return 1.0 if reply == word else 0.0

    def score_group(self, texts: list[str]) -> list[aitrain.ScoreValue]:
        return [len(text) for text in texts]


one: aitrain.Environment = Capitals()
two: aitrain.Environment = Shop()
three: aitrain.Environment = Guess()
"""
WRONG = """
import aitrain


class NoRows:
    def build_dataset(self) -> int:
        return 3


class NoScore:
    def step(self, reply: str) -> str | None:
        return None


def guess() -> aitrain.EpisodeGenerator:
    reply = yield 5
    return reply.upper()


one: aitrain.Environment = NoRows()
two: aitrain.EpisodeObject = NoScore()
"""


CONFIG = """
[tool.mypy]
strict = true
follow_imports = "silent"
[[tool.mypy.overrides]]
module = [
    "torch.*", "transformers.*", "datasets.*", "numpy.*", "pydantic.*", "httpx.*", "rich.*", "typer.*",
    "aitrain.notebook.*", "aitrain.options.*", "aitrain.runs.*", "aitrain.judges.*",
]
follow_imports = "skip"  # no part of an environment's types, and most of the time
"""


@pytest.mark.slow
def test_a_type_checker_takes_every_form_of_an_environment_and_finds_what_is_wrong(tmp_path: Path) -> None:
    for name, text in {"pyproject.toml": CONFIG, "right.py": RIGHT, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "right.py", "wrong.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    errors = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong.py", line] for line in ("16", "17", "20", "21")]
