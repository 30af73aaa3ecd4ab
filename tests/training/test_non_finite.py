"""Numbers gone wrong: real trainings in which a gradient, a loss or the weights become NaN or inf."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from aitrain.errors import RunFailed
from aitrain.runs.run_folder import read_object
from aitrain.training.step_events import all_finite
from aitrain.training.trainer import EpisodeTrainer
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, difference, weights
from tests.training.test_processes import Command


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`sick(steps, value)`: the gradient of one parameter is multiplied by the value in these steps."""
    step_of_trainer = EpisodeTrainer.training_step

    def make(steps: Collection[int], value: float = math.nan, lr: float | None = None) -> None:
        def training_step(self: Any, *arguments: Any) -> torch.Tensor:
            loss = step_of_trainer(self, *arguments)
            if self.state.global_step + 1 in steps:
                next(self.model.parameters()).grad.mul_(value)
                self.optimizer.param_groups[0]["lr"] = lr or self.optimizer.param_groups[0]["lr"]
            return loss

        monkeypatch.setattr(EpisodeTrainer, "training_step", training_step)

    return make


@pytest.mark.parametrize(
    ("options", "value"),
    [({}, math.nan), pytest.param({"max_grad_norm": 0.0}, math.inf, marks=pytest.mark.slow)],
)
def test_a_step_whose_gradient_is_not_finite_changes_nothing(
    options: dict[str, Any], value: float, train: Train, sick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sick({2, 4}, value)
    saved = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    result = train(Vowels(), max_steps=5, weight_decay=0.1, warmup_ratio=0.0, **saved, **options)

    at = [result.folder / "checkpoints" / f"checkpoint-{step}" for step in range(1, 6)]
    assert [difference(*pair) == 0.0 for pair in pairwise(at)] == [True, False, True, False]
    assert [line["skipped_steps"] for line in result.history] == [0, 1, 1, 2, 2]
    assert capsys.readouterr().err.count(": non-finite gradient") == 1
    assert result.status == "finished"


@pytest.mark.slow
def test_three_such_steps_in_a_row_end_the_run_with_the_last_good_weights(
    train: Train, sick: Any, tmp_path: Path
) -> None:
    sick({2, 3, 5, 6, 7})
    with pytest.raises(RunFailed, match=r"3 steps in a row, up to step 7.*(?s:.*)those of step 4.*(?s:.*)Lower --lr"):
        train(Vowels(), max_steps=10, project_name="bad")
    bad = tmp_path / "runs" / "bad"
    assert read_object(bad / "result.json")["status"] == "failed"
    assert all(torch.isfinite(tensor).all() for tensor in weights(bad / "model").values())


@pytest.mark.slow
def test_weights_that_are_not_finite_end_the_run_at_the_newest_checkpoint(
    train: Train, tmp_path: Path, sick: Any
) -> None:
    sick({3}, 1e15, lr=3e38)
    plain = {"optimizer": "sgd", "max_grad_norm": 0.0, "max_steps": 9, "lr": 1e-2}
    with pytest.raises(RunFailed, match="no longer finite after step 3"):
        train(Vowels(), **plain, save_strategy="steps", save_steps=1, project_name="kept")
    kept = tmp_path / "runs" / "kept"
    assert not (kept / "model").exists()
    assert not (kept / "result.json").exists()
    assert [folder.name for folder in (kept / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_one_odd_number_among_many_large_ones_is_found() -> None:
    device, good = torch.device("cpu"), torch.full((300, 300), 6e4, dtype=torch.float16)
    assert all_finite([good, torch.empty(0)], device)
    for value in (math.nan, -math.inf):
        bad = good.clone()
        bad[17, 200] = value
        assert not all_finite([good, bad], device)


@pytest.mark.slow
def test_processes_skip_together_what_only_one_of_them_sees(
    small_model: Path, tmp_path: Path, preloaded_aitrain: Path
) -> None:
    command = Command(small_model, tmp_path, str(preloaded_aitrain / "aitrain"))
    done = command.run("OddGradient", "--num-processes=2", "--max-steps=4", "--save-strategy=no")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Skipped optimizer step") == 1
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in metrics if "reward" in line] == [0, 1, 1, 1]
