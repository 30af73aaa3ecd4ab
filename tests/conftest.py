"""What all tests share: no network, a folder to work in, a small model, and the command as a user runs it."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from filelock import FileLock

from tests.finished_runs import FinishedRuns, shared_folder
from tests.preloaded import no_sync, start_server

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other gain nothing on the small model
os.fsync = no_sync
signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background jobs of a shell ignore, as in .ci/run
os.environ.pop("CI", None)  # a terminal in CI is not drawn over; tests of what a person sees would find nothing

Run = Callable[..., "subprocess.CompletedProcess[str]"]

LONGEST_FILES = (
    "test_docs.py", "test_benchmarks.py", "test_processes.py", "test_faults.py", "test_demo.py", "test_sharding.py",
    "test_served_run.py", "test_parity.py", "test_recipes.py", "test_resume.py",
)  # fmt: skip
"""Files that take longest, the longest first. They start first: one that starts last leaves the other cores idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for `--dist loadfile --no-loadscope-reorder`; the order within a file stays."""
    rank = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_sessionstart() -> None:
    """Search nothing for garbage while the tests are imported, which makes a million objects that stay; and keep the
    test modules as pytest rewrites them, also in a container that keeps Python from writing byte code."""
    gc.disable()
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Leave these objects out of later collections: one of all of them takes as long as a run of three steps."""
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, files: Mapping[str, str | bytes | None]) -> None:
    """Files with their text or bytes; None makes a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def json_lines(rows: Iterable[object]) -> str:
    """The text of a file with one JSON value a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, without a line that is being written; none if the file is missing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].split("\n") if line]


def episodes_of(run: Path, phase: str | None = None) -> list[dict[str, Any]]:
    """The records of training in a run folder, of all processes; or those of a scoring of held-out cases."""
    records = [record for file in sorted(run.glob("rollouts/*.jsonl")) for record in read_lines(file)]
    return [record for record in records if record.get("eval_phase") == phase]


def install_package(site: Path, name: str, version: str, metadata: str = "") -> Path:
    """The metadata of a package, as pip leaves it; returns its folder."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(folder, {"METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}"})
    return folder


def write_nvidia_smi(folder: Path, script: str) -> None:
    """A driver that says what the script of a shell says; the folder is to be on PATH."""
    write(folder, {"nvidia-smi": "#!/bin/sh\n" + script})
    (folder / "nvidia-smi").chmod(0o755)


def case_name(value: object) -> str:
    """The name of a test's case: without addresses, which differ between the processes that run tests."""
    return re.sub(r" at 0x[0-9a-f]+| id='\d+'", "", ascii(value))[:40]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody waits for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes_in(folder: Path, name: str = "") -> list[int]:
    """Ids of the processes whose working directory is the folder, and whose name or command has `name` in it."""
    return [
        one.pid
        for one in psutil.process_iter(["cwd", "name", "cmdline"])
        if one.info["cwd"] == str(folder.resolve())
        and name in " ".join([one.info["name"], *(one.info["cmdline"] or ())])
    ]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_in_process(command: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `aitrain COMMAND`, without a process; the streams are strict and
    lenient as Python's own are."""
    from aitrain.cli import main

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with mock.patch.multiple(sys, argv=["aitrain", *shlex.split(command), *arguments], stdout=out, stderr=err):
        code = main._run()
        out.flush()
        err.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


def listing(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="session")
def preloaded_aitrain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH whose `aitrain` has imported torch and TRL already, the same for all workers."""
    folder = shared_folder(tmp_path_factory) / "preloaded"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            return start_server(folder, os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    return folder / "bin"


@pytest.fixture
def aitrain(here: Path, preloaded_aitrain: Path) -> Run:
    """`aitrain("grpo", "--model", "tiny", ...)`: the command, in the working directory."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(preloaded_aitrain / "aitrain"), *arguments]
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=here, env=variables, stdin=subprocess.DEVNULL
        )

    return run


@pytest.fixture
def aitrain_grpo(aitrain: Run) -> Run:
    """`aitrain_grpo("--model", "tiny", ...)`: a training."""
    return partial(aitrain, "grpo")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer model of random weights and a tokenizer with a token for each byte. All
    workers have the same folder, because the config of a shared run names it."""
    import torch

    from tests.tiny_model import build_model, build_tokenizer

    folder = shared_folder(tmp_path_factory) / "model"
    with FileLock(f"{folder}.lock"):
        if not (folder / "tokenizer_config.json").exists():
            torch.manual_seed(0)
            tokenizer = build_tokenizer()
            build_model(tokenizer).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Runs that all tests share: `finished("plain")` is the result of one. Their folders are read-only."""
    return FinishedRuns(shared_folder(tmp_path_factory), small_model)
