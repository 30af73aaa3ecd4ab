"""`aitrain show`: live runs told from dead ones, folders that are damaged or somebody else's, and what a line shows."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.heartbeat import SILENCE, is_alive, sign_of_life, state_of
from aitrain.runs.new_folder import LOCK, lock_file
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


HOLDER = """
import sys
from pathlib import Path
from aitrain.runs.new_folder import locked
from aitrain.runs.run_folder import RunFolder
with locked(RunFolder(Path(sys.argv[1]))):
    print(1, flush=True)
    sys.stdin.read()
"""


def test_a_run_lives_as_long_as_a_process_has_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    status = {**sign_of_life(), "status": "running", "heartbeat": time.time() - 10 * SILENCE}
    folder.status.touch()  # the run has begun
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        assert state_of(folder, status) == "running"
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
        assert state_of(folder, status | sign_of_life()) == "dead"
        with (tmp_path / LOCK).open() as other:  # such as that of a page, which looks at the same time
            lock_file(other.fileno(), fcntl.LOCK_SH)
            assert state_of(folder, status) == "dead"


@pytest.mark.parametrize("harm", [lambda lock: None, os.mkfifo], ids=["no lock", "a pipe"])
def test_where_the_lock_cannot_be_seen_silence_counts(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    harm(tmp_path / LOCK)
    folder = RunFolder(tmp_path)
    for host in ({}, {"host": "elsewhere"}):
        now = {**sign_of_life(), **host}
        assert is_alive(folder, now | {"heartbeat": time.time() - SILENCE / 2})
        assert not is_alive(folder, now | {"heartbeat": time.time() - 2 * SILENCE})
    assert not is_alive(folder, {})


def test_a_lock_on_this_machine_says_nothing_of_a_run_elsewhere(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    assert is_alive(RunFolder(tmp_path), {**sign_of_life(), "host": "elsewhere"})


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
