"""Diagnostics of a training: what is reported while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain import Result
from aitrain.runs.diagnosis import LINES_IN_A_ROW, findings_of
from aitrain.runs.run_folder import RunFolder
from tests.training.conftest import difference


class Same:
    """All answers are worth the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def score_episode(self) -> float:
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs_and_stops_itself_when_it_may(
    train: Callable[..., Result], small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = LINES_IN_A_ROW + 1
    result = train(Same(), max_steps=50, stop_when_flat=steps)

    said = capsys.readouterr().err
    assert said.count("100% of the groups all completions score the same, at 0") == 1
    assert "No step changed the weights" in said
    assert difference(result.model, small_model) == 0.0
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])
    assert "zero_variance" in [finding.name for finding in findings_of(RunFolder(result.folder))]

    written = json.loads((result.folder / "result.json").read_text())
    assert result.status == written["status"] == "stopped"
    assert (result.steps, written["score_after"]) == (steps, 0.0)
    assert written["stopped_because"].startswith(f"in {steps} steps no group's scores differed")
    assert (result.folder / "checkpoints" / f"checkpoint-{steps}").exists()
