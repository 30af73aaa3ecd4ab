"""What the tests of the page share: runs of all kinds, records as runs write them, and a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.rollout_index import RolloutIndex
from aitrain.ui.server import PageServer
from tests.finished_runs import FinishedRuns

Serve = Callable[..., PageServer]


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of each kind, made by hand. Read-only."""
    from tests.ui import made_runs

    folder = tmp_path_factory.mktemp("kinds")
    made_runs.make_better(folder / "better")
    made_runs.make_failed(folder / "failed")
    made_runs.make_live(folder / "live")
    made_runs.make_eval(folder / "eval-sums")
    made_runs.make_sweep(folder / "lr-sweep")
    return folder


@pytest.fixture(scope="session")
def real_run(finished: FinishedRuns) -> Path:
    """The folder of a real run of four steps. Read-only."""
    return finished.make("plain")


def record(**differences: Any) -> dict[str, Any]:
    """An episode's record as a run writes it."""
    prompt = [{"role": "user", "content": "1 + 1 = ?"}]
    usual = {
        "schema": 1, "step": 1, "weight_version": 0, "group": 0, "advantage": 0.5, "case_idx": 0,
        "row": {"answer": 2}, "seed": 1, "prompt": prompt, "tools": [],
        "messages": [*prompt, {"role": "assistant", "content": "2"}], "completion": "2",
        "turns": [{"tokens": 2}], "tokens": 2, "score": 1.0, "metrics": {}, "stop": "done",
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
        one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        for one in records
    ]
    (folder / "rollouts" / "rank0.jsonl").write_bytes(b"".join(lines))
    return folder


def read(folder: Path) -> RolloutIndex:
    """The rollouts of a run folder."""
    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    return rollouts


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(folder, ...)`: the page of these places, on a free port."""
    servers: list[PageServer] = []

    def start(*places: Path) -> PageServer:
        servers.append(PageServer(places, 0))
        threading.Thread(target=servers[-1].run, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.server.should_exit = True
