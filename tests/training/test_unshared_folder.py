"""Two ranks that do not see the same run folder, as on two machines that share no disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aitrain.events import OWN_FOLDER_VARIABLE
from aitrain.runs.checkpoint import damage_of
from aitrain.training.unshared_folder import RECEIVED
from tests.conftest import Run, listing
from tests.training.test_resume import as_if_killed_after, assert_same

ENVIRONMENT = """
class Vowels:
    def build_dataset(self):
        return [{"prompt": f"say {number}"} for number in range(16)]

    def score_episode(self, completion):
        return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))
"""
OPTIONS = [
    *("--num-processes=2", "--max-steps=4", "--save-strategy=steps", "--save-steps=2", "--save-total-limit=5"),
    *("--peft", "--lora-r=4", "--lora-dropout=0.3", "--rl-max-new-tokens=4", "--lr=1e-3", "--eval-cases=2"),
    *("--eval-strategy=steps", "--eval-steps=2", "--save-best", "--output-dir=."),
]


@pytest.fixture
def shared(small_model: Path, here: Path, aitrain_grpo: Run) -> Path:
    """A run of four steps on two ranks, with a folder that both see."""
    (here / "env.py").write_text(ENVIRONMENT)
    done = aitrain_grpo(f"--model={small_model}", "--rl-env=env.py:Vowels", "--project-name=shared", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return here / "shared"


def workers(python: Path, folders: list[Path], checkpoint: str) -> list[subprocess.Popen[str]]:
    """A rank for each folder, of which only the first one is the run's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(folders)), "LOCAL_RANK": "0"}
    return [
        subprocess.Popen(
            [python, "-P", "-m", "aitrain.jobs.worker", str(folder), "0", str(folder / "checkpoints" / checkpoint)],
            env={**os.environ, **meeting, "RANK": str(rank), **({OWN_FOLDER_VARIABLE: "1"} if rank else {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, folder in enumerate(folders)
    ]  # fmt: skip


def states(checkpoint: Path) -> dict[str, Any]:
    """The files of a checkpoint whose bytes follow from the run."""
    names = [name for name in listing(checkpoint) if name.startswith(("rng_state", "window")) and "json" not in name]
    return {name: (checkpoint / name).read_bytes() for name in names}


@pytest.mark.slow
def test_a_run_without_a_shared_folder_is_resumed_exactly_and_nothing_of_it_is_missing(
    shared: Path, preloaded_aitrain: Path
) -> None:
    run = as_if_killed_after(shared, 2, "run")
    apart = run.with_name("apart")
    apart.mkdir()
    for name in ("config.yaml", "status.json"):
        shutil.copy(run / name, apart)
    running = workers(preloaded_aitrain / "preloaded-python", [run, apart], "checkpoint-2")
    outputs = [process.communicate(timeout=240) for process in running]

    assert [process.returncode for process in running] == [0, 0], outputs
    assert_same(shared, run)
    checkpoints = [folder / "checkpoints" / "checkpoint-4" for folder in (shared, run)]
    assert damage_of(checkpoints[1]) == ""
    assert listing(checkpoints[0]) == listing(checkpoints[1])
    assert len(states(checkpoints[0])) == 4
    assert states(checkpoints[0]) == states(checkpoints[1])
    assert (apart / f"{RECEIVED}1" / "checkpoint-2" / "optimizer.pt").exists()
    assert listing(apart / "checkpoints") == []
    assert not list(apart.glob("rollouts/*"))
