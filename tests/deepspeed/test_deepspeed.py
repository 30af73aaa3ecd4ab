"""DeepSpeed on two CPU processes, in the environment of `.ci/deepspeed`; skipped without DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write
from tests.training.conftest import weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed; .ci/deepspeed installs it"
)
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}
ENVIRONMENT = """\
import deepspeed
from tests.environments.vowels import Vowels

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for two minutes; without it, gloo is used

class Same(Vowels):
    pass
"""


def test_a_run_with_a_file_of_deepspeed_ends_like_one_without(here: Path, small_model: Path, aitrain_grpo: Any) -> None:
    write(here, {"ds.json": json.dumps(AUTO), "same.py": ENVIRONMENT})
    options = ["--model", str(small_model), "--rl-env", "same.py:Same", "--max-steps", "2"]
    options += ["--num-processes", "2", "--eval-cases", "2", "--lr", "1e-3", "--batch-size", "2"]
    plain = aitrain_grpo(*options, "--project-name", "plain")
    ours = aitrain_grpo(*options, "--project-name", "zero", "--trl", "deepspeed=ds.json")

    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    expected, found = weights(here / "runs/plain/model"), weights(here / "runs/zero/model")
    assert all((found[name] - weight).abs().max().item() <= 1e-6 for name, weight in expected.items())
    refused = aitrain_grpo("--config", "runs/zero/config.yaml", "--resume", "--max-steps", "3")
    assert refused.returncode == 2
    assert "--distributed-backend fsdp2" in refused.stderr
