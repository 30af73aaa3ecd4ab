"""Trainings with the real packages of other frameworks, in the environments of `.ci/adapters`; skipped elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from aitrain.runs.run_folder import read_lines

ENVIRONMENT = os.environ.get("AITRAIN_REAL_ADAPTERS", "")
"""Name of the environment of `.ci/adapters`; a package that is missing there fails its tests."""

ROOT = Path(__file__).parents[3]
STEPS = 5


def in_environment(name: str) -> pytest.MarkDecorator:
    """The mark of tests that run in one of the environments."""
    return pytest.mark.skipif(name != ENVIRONMENT, reason=f"runs in the environment {name} of .ci/adapters")


@dataclass
class Trained:
    """What came of a training."""

    metrics: list[dict[str, Any]]
    records: list[dict[str, Any]]

    def missing(self, name: str) -> list[dict[str, Any]]:
        """The lines of steps in metrics.jsonl without this metric of the environment."""
        return [line for line in self.metrics if "reward" in line and f"env/{name}" not in line]


Train = Callable[..., Trained]


@pytest.fixture
def train(here: Path) -> Train:
    """`train("textarena:GuessTheNumber-v0", "--num-processes=2", size=8)`: five steps with the tiny model, in which no
    episode failed."""

    def run(rl_env: str, *flags: str, **settings: Any) -> Trained:
        done = grpo(here, rl_env, *flags, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = list(read_lines(here / "run" / "metrics.jsonl"))
        records = [one for file in (here / "run" / "rollouts").glob("*.jsonl") for one in read_lines(file)]
        trained = [one for one in records if "eval_phase" not in one]
        assert metrics[-1]["step"] == STEPS
        assert [one["error"] for one in trained if one["error"]] == []
        assert all(one["score"] is not None and one["messages"] for one in trained)
        return Trained(metrics, trained)

    return run


def grpo(folder: Path, rl_env: str, *flags: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`aitrain grpo` with the tiny model: 4 prompts x 2 completions a step, and as few held-out cases as possible."""
    small = ["--max-steps=5", "--rl-max-new-tokens=4", "--rl-max-turns=2", "--rl-prompts-per-step=4"]
    small += ["--rl-num-generations=2", "--batch-size=4", "--eval-cases=2", "--project-name=run", "--output-dir=."]
    command = [sys.executable, "-m", "aitrain", "grpo", "--model=tiny", f"--rl-env={rl_env}", *small, *flags]
    return subprocess.run(
        [*command, f"--rl-env-config={json.dumps(settings)}"],
        capture_output=True, text=True, check=False, cwd=folder, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@contextmanager
def server(file: str, folder: Path, ready: str, **variables: str) -> Iterator[str]:
    """A server of this folder's, as a process of its own, until it answers `ready`; gives its URL."""
    port_file, log = folder / "port", folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / file), str(port_file)],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables},
        )  # fmt: skip
    try:
        yield _url_when_ready(process, port_file, ready, log)
    finally:
        process.terminate()
        process.wait()


def _url_when_ready(process: subprocess.Popen[bytes], port_file: Path, ready: str, log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        if port_file.exists() and (port := port_file.read_text()):
            try:
                url = f"http://127.0.0.1:{port}"
                httpx.get(f"{url}{ready}", trust_env=False).raise_for_status()
                return url
            except httpx.HTTPError:
                continue
    raise AssertionError(log.read_text())
