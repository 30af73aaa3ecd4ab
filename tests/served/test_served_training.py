"""A training on `aitrain env serve`, with the commands as a user gives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.runs.run_folder import read_object
from tests.conftest import Run, episodes_of
from tests.training.test_resume import assert_same

ENVIRONMENT = """\
import random

class Guess:
    def build_dataset(self):
        return [{"prompt": f"{random.random():.4f}?", "pair": (n, {n})} for n in range(12)]

    def episode(self, seed, pair):
        assert isinstance(pair, tuple)
        said = yield None
        said += yield f" {random.Random(seed).random():.3f} "
        return {"score": len(set(said)) % 7 / 7, "letters": float(len(said))}
"""
OPTIONS = (
    "--model", "tiny", "--max-steps", "2", "--rl-max-turns", "3", "--rl-max-new-tokens", "6", "--eval-cases", "4",
)  # fmt: skip
TOKEN = "a-token-that-is-in-no-file"


def test_a_training_on_a_server_is_that_on_the_environment_itself(
    here: Path, aitrain_grpo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITRAIN_ENV_TOKEN", TOKEN)
    (here / "guess.py").write_text(ENVIRONMENT)
    local = aitrain_grpo(*OPTIONS, "--project-name", "local", "--rl-env", "guess.py")
    command = [sys.executable, "-P", "-m", "aitrain", "env", "serve", "guess.py", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        url = next(line.split()[-1] for line in server.stdout or () if line.startswith("Train on it"))
        remote = aitrain_grpo(*OPTIONS, "--project-name", "remote", "--rl-env", url)
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does
        assert server.wait(20) == 0
    assert (local.returncode, remote.returncode) == (0, 0), local.stderr + remote.stderr
    runs = here / "runs"
    episodes = episodes_of(runs / "local")
    assert len(episodes) == 16
    assert {*episodes[0]["row"]} == {"pair"}
    assert_same(runs / "local", runs / "remote")
    kept, served = (read_object(runs / name / "environment.json") for name in ("local", "remote"))
    assert (served["sha256"], served["served_by"]) == (kept["sha256"], [url])
    assert (runs / "remote" / "environment" / "guess.py").read_text() == ENVIRONMENT
    for folder, _, names in os.walk(runs):
        assert not any(TOKEN.encode() in Path(folder, name).read_bytes() for name in names)
