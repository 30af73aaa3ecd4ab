"""The checks before a training change nothing of the training."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aitrain
from aitrain import TrainConfig
from aitrain.jobs import environment_check
from aitrain.runs.run_folder import RunFolder
from aitrain.workbench.check.before_training import FastCheck, check_quickly


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


def records(config: TrainConfig) -> list[dict[str, Any]]:
    result = aitrain.train(config, environment=Gambling())
    found = []
    for file in sorted(RunFolder(result.folder).rollouts.glob("*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    timeless = [{name: value for name, value in record.items() if "second" not in name} for record in found]
    for record in timeless:
        record["turns"] = [
            {name: value for name, value in turn.items() if "second" not in name} for turn in record.get("turns", [])
        ]
    return timeless


@pytest.mark.usefixtures("here")
def test_episodes_scores_and_random_numbers_are_those_of_a_run_without_the_checks(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(environment_check, "check_quickly", partial(check_quickly, seconds=60.0))  # on any machine
    monkeypatch.setattr(FastCheck, "lines", lambda found: told.append(f"{found.passed}{found.skipped}") or iter(()))
    common: dict[str, Any] = {"max_steps": 2, "rl_max_new_tokens": 4, "eval_cases": 2, "save_strategy": "no"}
    with_checks = records(TrainConfig(model=str(small_model), project_name="with", **common))
    assert len(told) == 1
    assert told[0].isdecimal()
    assert int(told[0]) > 4
    without = records(TrainConfig(model=str(small_model), project_name="without", rl_check=False, **common))
    assert len(told) == 1
    assert with_checks == without
    assert with_checks[0]["metrics"] == {"count": 1.0}


@pytest.mark.slow
def test_a_run_notes_what_was_found_and_goes_on(
    here: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Generous(Gambling):
        def score_episode(self, text: str) -> float:  # type: ignore[override]
            return 1.0

    quick: dict[str, Any] = {"max_steps": 1, "rl_max_new_tokens": 4, "eval_cases": 0, "save_strategy": "no"}
    aitrain.train(TrainConfig(model=str(small_model), **quick), environment=Generous())
    assert "Environment check floor" in capsys.readouterr().err
