"""The hash seed of training processes; that they run with it is in training/test_episode_groups.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.launch.preflight import check
from aitrain.launch.processes import Processes
from aitrain.runs.run_folder import RunFolder


@pytest.mark.parametrize(("own", "seed"), [(None, "0"), ("7", "7")])
def test_training_processes_have_one_hash_seed_unless_the_user_set_another(
    own: str | None, seed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if own is not None:
        monkeypatch.setenv("PYTHONHASHSEED", own)
    plan = check(TrainConfig(model="tiny", rl_env="envs.arithmetic"))
    assert Processes(plan, RunFolder(tmp_path), print)._environment()["PYTHONHASHSEED"] == seed
