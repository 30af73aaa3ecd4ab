"""Runs of environments that declare what they need: what takes effect, and what is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from aitrain import EnvRequirements, Result, Score
from aitrain.options.reading import read_file
from aitrain.options.train import TrainConfig
from tests.training.conftest import rollouts

Train = Callable[..., Result]


class Declares:
    """Runs in processes of its own; knows its cases from building the dataset."""

    requirements = EnvRequirements(isolation="process", max_new_tokens=3, score_range=(-1, 1), max_turns=5)

    def __init__(self) -> None:
        self.home = os.getpid()

    def build_dataset(self) -> list[dict[str, Any]]:
        self.words = [f"word {number}" for number in range(12)]
        return [{"prompt": word} for word in self.words]

    def score_episode(self, model: Any, tokenizer: Any, completion: str) -> Score:
        metrics = {"elsewhere": os.getpid() != self.home, "cases": len(self.words), "known": len(tokenizer)}
        return Score(-len(completion) % 5 / 5 - 1, metrics)


def test_what_the_environment_declares_takes_effect_and_is_written_down(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Declares(), rl_max_new_tokens=4, eval_cases=0, max_steps=2)

    records = rollouts(result)
    assert all(record["metrics"] == {"elsewhere": 1.0, "cases": 12.0, "known": 259.0} for record in records)
    assert all(record["score"] < 0 for record in records)
    assert max(record["tokens"] for record in records) == 4
    written = read_file(TrainConfig, result.folder / "config.yaml")
    expected = {"rl_env_isolation": "process", "rl_max_new_tokens": 4, "rl_score_range": "-1,1", "rl_max_turns": 5}
    assert written.items() >= expected.items()
    facts = json.loads((result.folder / "environment.json").read_text())
    assert facts["requires"] == Declares.requirements.as_options()
    assert "Declares requires" in capsys.readouterr().err
