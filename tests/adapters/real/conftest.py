"""Trainings with the real packages of other frameworks, in the environments of `.ci/adapters`; skipped elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, episodes_of, read_lines

ENVIRONMENT = os.environ.get("AITRAIN_REAL_ADAPTERS", "")
"""Name of the environment of `.ci/adapters`; a package that is missing there fails its tests."""

ROOT = Path(__file__).parents[3]


def in_environment(name: str) -> pytest.MarkDecorator:
    """The mark of tests that run in one of the environments."""
    return pytest.mark.skipif(name != ENVIRONMENT, reason=f"runs in the environment {name} of .ci/adapters")


Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(here: Path, aitrain_grpo: Run) -> Train:
    """`train("textarena:GuessTheNumber-v0", "--num-processes=2", size=8)`: five steps with the tiny model, in which no
    episode failed; returns the records of the episodes."""

    def run(rl_env: str, *flags: str, **settings: Any) -> list[dict[str, Any]]:
        small = ["--max-steps=5", "--rl-max-new-tokens=4", "--rl-max-turns=2", "--rl-prompts-per-step=4"]
        small += ["--rl-num-generations=2", "--batch-size=4", "--eval-cases=2", "--project-name=run", "--output-dir=."]
        given = f"--rl-env-config={json.dumps(settings)}"
        done = aitrain_grpo("--model=tiny", f"--rl-env={rl_env}", given, *small, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        *_, last = read_lines(here / "run" / "metrics.jsonl")
        trained = episodes_of(here / "run")
        assert last["step"] == 5
        assert [one["error"] for one in trained if one["error"]] == []
        assert all(one["score"] is not None and one["messages"] for one in trained)
        return trained

    return run


@contextmanager
def server(file: str, folder: Path, **variables: str) -> Iterator[str]:
    """A server of this folder's, as a process of its own, as soon as it listens; gives its URL."""
    port, command = folder / "port", [sys.executable, str(Path(__file__).parent / file), str(folder / "port")]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        while not (port.exists() and port.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        try:
            yield f"http://127.0.0.1:{port.read_text()}"
        finally:
            process.terminate()
