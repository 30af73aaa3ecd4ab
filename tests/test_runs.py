"""`aitrain show`: live runs told from dead ones, folders that are damaged or somebody else's, and what a line shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from aitrain.runs.heartbeat import SILENCE, is_alive, sign_of_life, state_of
from aitrain.runs.run_folder import RunFolder, append_lines, write_json
from tests.conftest import run_in_process


def make(parent: Path, name: str, status: dict[str, Any] | None = None, **result: Any) -> RunFolder:
    folder = RunFolder(parent / name)
    folder.path.mkdir(parents=True)
    folder.config.write_text("model: tiny\n")
    if status is not None:
        write_json(folder.status, status)
    if result:
        write_json(folder.result, result)
    return folder


# -- live or dead


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_run_lives_as_long_as_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(sleeper.pid).create_time()
    status = sign_of_life() | {"pid": sleeper.pid, "started": started, "heartbeat": time.time() - 10 * SILENCE}
    assert is_alive(status)
    assert state_of({**status, "status": "running"}) == "running"
    assert not is_alive(status | {"started": started - 2 * SILENCE})  # another process with this id
    assert is_alive(status | {"started": started - 2 * SILENCE, "heartbeat": time.time()})  # the clock was set
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked for its exit code yet
    assert not is_alive(status)
    sleeper.wait()
    assert not is_alive(status)


def test_where_the_process_cannot_be_seen_silence_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[1]")  # in a container, which may have its machine's name
    here = {**sign_of_life(), "pid": 2**30}
    monkeypatch.undo()
    assert is_alive(here | {"heartbeat": time.time() - SILENCE / 2})
    assert not is_alive(here | {"heartbeat": time.time() - 2 * SILENCE})
    assert not is_alive({})


# -- what the command shows


def test_every_kind_of_run_is_one_line_that_fits_with_its_scores_and_whose_name_is_no_command(tmp_path: Path) -> None:
    make(tmp_path, "evil\x1b[2J\n\udcff", {"status": "finished"})
    status = {"status": "stopped", "step": 9999, "steps": 100000, "heartbeat": time.time() - 5}
    append_lines(make(tmp_path, "run" + "-on" * 20, status).metrics, [{"reward": 0.0}, {"reward": 1.0}])
    scores = {"greedy": {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 8}}
    make(tmp_path, "greedy", status | {"job": "eval"}, scores=scores)
    swept = {"job": "sweep", "step": 2, "steps": 4}
    make(tmp_path, "lrs", status | swept, score_before=0.75, score_after=0.25)

    out = run_in_process("show", str(tmp_path))[1]
    assert max(map(len, out.splitlines())) <= 80
    assert r"evil\x1b[2J \udcff" in out
    lines = {line.split()[0][:4]: line.split()[1:-1] for line in out.splitlines()}
    assert "run-on-on-on-on-on-on-o… " in out
    assert lines["run-"] == ["stopped", "9999/100000", "reward", "0.000", "->", "1.000"]
    assert lines["gree"] == ["stopped", "9999/100000", "eval", "0.500"]
    assert lines["lrs"] == ["stopped", "2/4", "sweep", "0.750", "->", "0.250"]
