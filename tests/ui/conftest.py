"""What the tests of the page share: a real run of a few steps, records as runs write them, and a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.ui.run_registry import RunRegistry
from aitrain.ui.server import PageServer

SHORT = [
    "--rl-prompts-per-step=4", "--rl-num-generations=4", "--batch-size=16", "--rl-max-new-tokens=8", "--lr=4e-4",
    "--rl-kl-coef=0.02", "--save-strategy=no", "--eval-strategy=steps", "--eval-steps=3", "--eval-cases=8",
]  # fmt: skip


def train(aitrain: Path, folder: Path, *flags: str, environment: str = "envs.arithmetic") -> Path:
    """A real run on the tiny model; returns its folder."""
    command = [str(aitrain / "aitrain"), "grpo", "--model=tiny", f"--rl-env={environment}", *SHORT, *flags]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "runs").glob("*")
    return made


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory, preloaded_aitrain: Path) -> Path:
    """The folder of a run of eight steps; nobody may change it."""
    return train(preloaded_aitrain, tmp_path_factory.mktemp("real"), "--max-steps=8", "--project-name=sums")


@pytest.fixture(scope="session")
def real_runs(real_run: Path, tmp_path_factory: pytest.TempPathFactory, preloaded_aitrain: Path) -> Path:
    """A folder of two runs that differ by one option."""
    folder = tmp_path_factory.mktemp("two")
    train(preloaded_aitrain, folder, "--max-steps=4", "--project-name=other", "--seed=7")
    shutil.copytree(real_run, folder / "runs" / "sums")
    return folder / "runs"


def record(**differences: Any) -> dict[str, Any]:
    """An episode's record as a run writes it."""
    prompt = [{"role": "user", "content": "1 + 1 = ?"}]
    usual = {
        "schema": 1, "step": 1, "weight_version": 0, "group": 0, "advantage": 0.5, "case_idx": 0,
        "row": {"answer": 2}, "seed": 1, "prompt": prompt, "tools": [],
        "messages": [*prompt, {"role": "assistant", "content": "2"}], "completion": "2",
        "turns": [{"tokens": 2, "weight_version": 0}], "tokens": 2, "score": 1.0, "metrics": {}, "stop": "done",
        "error": None, "seconds": 0.1,
    }  # fmt: skip
    return {**usual, **differences}


def said(text: str, **differences: Any) -> dict[str, Any]:
    """An episode in which the model says this."""
    answer = {"role": "assistant", "content": text}
    return record(messages=[{"role": "user", "content": "1 + 1 = ?"}, answer], completion=text, **differences)


def write_run(folder: Path, records: Iterable[dict[str, Any] | bytes]) -> Path:
    """A run folder with these rollouts; bytes are lines as they are."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    lines = [
        one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        for one in records
    ]
    (folder / "rollouts" / "rank0.jsonl").write_bytes(b"".join(lines))
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[..., PageServer]]:
    """`serve(folder, ...)`: the page of these places, on a free port."""
    servers: list[PageServer] = []

    def start(*places: Path) -> PageServer:
        servers.append(PageServer(RunRegistry(places), 0))
        threading.Thread(target=servers[-1].serve_forever, args=[0.05], daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
