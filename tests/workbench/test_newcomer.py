"""The newcomer's path, as the script of CI walks it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_newcomer_gets_from_an_empty_folder_to_a_trained_model_with_one_edit(preloaded_aitrain: Path) -> None:
    """By commands that are forked from a process which has imported torch."""
    command = [str(ROOT / ".ci" / "newcomer"), str(preloaded_aitrain)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    scores, *_ = re.findall(r"^sampled +([0-9.]+) \[.*?\] +([0-9.]+) ", done.stdout, re.MULTILINE)
    before, after = map(float, scores)
    assert after > before + 0.1, done.stdout
    assert "after compared with before: better" in done.stdout
    assert "the newcomer's path took" in done.stdout
