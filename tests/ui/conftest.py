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
from filelock import FileLock

from aitrain.ui.run_registry import RunRegistry
from aitrain.ui.server import PageServer
from tests.finished_runs import shared_folder

SHORT = [
    "--rl-prompts-per-step=4", "--rl-num-generations=4", "--batch-size=16", "--rl-max-new-tokens=8", "--lr=4e-4",
    "--rl-kl-coef=0.02", "--save-strategy=no", "--eval-strategy=steps", "--eval-steps=3", "--eval-cases=8",
]  # fmt: skip


def train(aitrain: Path, folder: Path, *flags: str) -> None:
    """A real run on the tiny model, in the folder."""
    command = [str(aitrain / "aitrain"), "grpo", "--model=tiny", "--rl-env=envs.arithmetic", *SHORT, *flags]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def real_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs that differ by one option, made once for all workers. Read-only."""
    folder = shared_folder(tmp_path_factory) / "page"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made, aitrain = folder.with_name("page-begun"), request.getfixturevalue("preloaded_aitrain")
            shutil.rmtree(made, ignore_errors=True)  # of a worker that failed
            made.mkdir()
            train(aitrain, made, "--max-steps=8", "--project-name=sums")
            train(aitrain, made, "--max-steps=4", "--project-name=other", "--seed=7")
            made.rename(folder)
    return folder / "runs"


@pytest.fixture(scope="session")
def real_run(real_runs: Path) -> Path:
    """The folder of a run of eight steps. Read-only."""
    return real_runs / "sums"


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
