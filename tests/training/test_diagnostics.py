"""Diagnostics of a training: reported while it runs, once, also after it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from aitrain import Result
from aitrain.runs.level_rules import LINES_IN_A_ROW
from tests.environments.vowels import Vowels


class Same:
    """All answers are worth the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def score_episode(self) -> float:
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs(
    train: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Same(), max_steps=LINES_IN_A_ROW + 1)

    assert capsys.readouterr().err.count("100% of the groups all completions score the same, at 0") == 1
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])


def test_a_run_that_cannot_learn_stops_itself_when_it_may_and_says_why(train: Callable[..., Result]) -> None:
    result = train(Same(), max_steps=50, stop_when_flat=4)

    written = json.loads((result.folder / "result.json").read_text())
    assert result.status == written["status"] == "stopped"
    assert result.steps == 4
    assert written["stopped_because"].startswith("in 4 steps no group's scores differed, the last ones all near 0.00")
    assert written["score_after"] == 0.0
    assert (result.folder / "checkpoints" / "checkpoint-4").exists()


class Rarely(Same):
    """The same, but for one group in the third step."""

    def score_episode(self) -> float:
        self.scored = getattr(self, "scored", 0) + 1
        return float(self.scored == 25)


def test_a_single_group_that_differs_begins_the_count_anew(train: Callable[..., Result]) -> None:
    result = train(Rarely(), max_steps=50, stop_when_flat=4, eval_cases=0)

    assert [line["frac_reward_zero_std"] for line in result.history] == [1, 1, 1, 0.5, 1, 1, 1, 1]
    assert result.status == "stopped"


def test_a_run_that_learns_does_not_stop_itself(train: Callable[..., Result]) -> None:
    result = train(Vowels(), max_steps=8, stop_when_flat=2)

    assert result.status == "finished"
    assert json.loads((result.folder / "result.json").read_text())["stopped_because"] is None
