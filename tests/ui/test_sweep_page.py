"""The page of a sweep: its trials, best first, and an axis for each searched option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain.ui.sweep_page import page_data
from tests.ui.made_runs import sweep_in


def test_the_page_has_the_trials_best_first_with_axes_for_the_searched_options(tmp_path: Path) -> None:
    record = sweep_in(tmp_path / "lrs")
    data: Any = page_data(record)
    assert [trial["number"] for trial in data["trials"]] == [4, 3, 2, 1, 0, 5]
    assert data["best"] == 4
    assert data["axes"] == [
        {"name": "lr", "low": 1e-7, "high": pytest.approx(1e-2), "log": True},
        {"name": "rl_loss_type", "choices": ["grpo", "dapo"]},
    ]
    assert data["trials"][-1]["scores"] == [(5, 0.2), (10, 0.3)]
    assert page_data(sweep_in(tmp_path / "least", direction="minimize"))["best"] == 1
    record.trials = []
    assert page_data(record)["best"] is None
