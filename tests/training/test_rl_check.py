"""The checks before a training change nothing of the training."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aitrain
from aitrain import TrainConfig
from aitrain.runs.run_folder import read_lines
from aitrain.workbench.check import before_training
from aitrain.workbench.check.before_training import FastCheck, check_quickly
from tests.training.test_resume import assert_same


class Gambling:
    """Scores depend on three global generators, and on how many were made before."""

    def __init__(self) -> None:
        self.count = 0

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}"} for number in range(12)]

    def reference(self, case_idx: int) -> str:
        return str(case_idx)

    def score_episode(self, text: str) -> aitrain.Score:
        self.count += 1
        luck = random.random() + numpy.random.random() + torch.rand(()).item()
        return aitrain.Score(luck / 3, {"count": self.count})


@pytest.mark.usefixtures("here")
def test_episodes_scores_and_random_numbers_are_those_of_a_run_without_the_checks(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(before_training, "check_quickly", partial(check_quickly, seconds=60.0))  # on any machine
    monkeypatch.setattr(FastCheck, "lines", lambda found: told.append(f"{found.passed}{found.skipped}") or iter(()))
    common: Any = {"model": str(small_model), "max_steps": 2, "rl_max_new_tokens": 4, "eval_cases": 2}
    runs = [
        aitrain.train(TrainConfig(project_name=str(checks), rl_check=checks, **common), environment=Gambling()).folder
        for checks in (True, False)
    ]
    assert len(told) == 1
    assert told[0].isdecimal()
    assert int(told[0]) > 4
    assert_same(*runs)
    first = next(read_lines(runs[0] / "rollouts" / "rank0.jsonl"))
    assert first["metrics"] == {"count": 1.0}
