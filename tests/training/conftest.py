"""What the tests of the heavy wing share: short runs on the small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aitrain
from aitrain import Result, TrainConfig
from aitrain.engines import scopes
from aitrain.ui import card, report_writer

torch.set_num_threads(1)  # threads that wait for each other gain nothing on the small model


@pytest.fixture(autouse=True)
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of a short run in this process would go to its heap, which is frozen already (tests/conftest.py),
    and on drawing reward.png. Tests of these take them back: test_scopes.py and test_card.py."""
    monkeypatch.setattr(scopes, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    monkeypatch.setattr(card, "draw_curve", lambda *_: None)
    monkeypatch.setattr(report_writer, "draw_curve", lambda *_: None)


@pytest.fixture
def train(small_model: Path, tmp_path: Path) -> Callable[..., Result]:
    """`train(environment, option=...)`: a run of a few steps on the small model, in this process."""

    def run(environment: Any, **options: Any) -> Result:
        short = {"max_steps": 3, "rl_max_new_tokens": 6, "rl_kl_coef": 0.0, "lr": 1e-3, "save_strategy": "no"}
        passes = {} if "tokens_per_pass" in options else {"batch_size": 2}  # several for each step, as on a GPU
        config = {"model": str(small_model), "output_dir": str(tmp_path / "runs"), **short, **passes, **options}
        return aitrain.train(TrainConfig(**config), environment=environment)

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def difference(one: Path, other: Path) -> float:
    """The largest difference between the weights of two saved models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
