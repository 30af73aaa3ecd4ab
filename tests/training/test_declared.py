"""Runs of environments that declare what they need: what takes effect, what is written, and how they are resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvRequirements, Result, Score
from aitrain.options.reading import read_file
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import read_lines
from tests.environments.vowels import Vowels

Train = Callable[..., Result]
SAVED = {
    "save_strategy": "steps",
    "save_steps": 1,
    "project_name": "run",
    "eval_cases": 0,
    "max_steps": 2,
    "save_total_limit": 9,
}


class Declares(Vowels):
    requirements = EnvRequirements(isolation="process", max_new_tokens=3, score_range=(-1, 1), max_turns=5)

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def score_episode(self, completion: str, case_idx: int) -> Score:  # type: ignore[override]
        return Score(-len(completion) % 5 / 5 - 1, {"elsewhere": os.getpid() != self.home})


def options_of(folder: Path) -> dict[str, Any]:
    return read_file(TrainConfig, folder / "config.yaml")


def test_what_the_environment_declares_takes_effect_and_is_written_down(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Declares(), rl_max_new_tokens=4, **SAVED)

    records = [*read_lines(result.folder / "rollouts" / "rank0.jsonl")]
    assert {record["metrics"]["elsewhere"] for record in records} == {1.0}
    assert all(record["score"] < 0 for record in records)
    assert max(record["tokens"] for record in records) == 4
    options = options_of(result.folder)
    assert [options[name] for name in ("rl_env_isolation", "rl_max_new_tokens", "rl_score_range", "rl_max_turns")] == [
        "process", 4, "-1,1", 5
    ]  # fmt: skip
    facts = json.loads((result.folder / "environment.json").read_text())
    assert facts["requires"] == Declares.requirements.as_options()
    (checkpoint,) = result.folder.glob("checkpoints/checkpoint-1")
    assert train(Declares(), rl_max_new_tokens=4, **SAVED, resume_from_checkpoint=str(checkpoint)).steps == 2
    note = 'Declares requires rl_env_isolation="process", rl_max_turns=5, rl_score_range="-1,1".'
    assert " ".join(capsys.readouterr().err.split()).count(note) == 2
