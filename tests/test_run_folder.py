"""Where a run's things lie, and that they are written whole or not at all."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from aitrain import TrainConfig
from aitrain.errors import CannotWriteError
from aitrain.runs.new_folder import LOCK, lock_file, locked
from aitrain.runs.run_folder import RunFolder, append_lines, read_object, write_text
from tests.conftest import read_lines


def test_a_folder_is_never_shared_and_a_discarded_one_goes(tmp_path: Path) -> None:
    wanted = TrainConfig(output_dir=str(tmp_path / "runs"), project_name="mine")
    first, second = RunFolder.create(wanted), RunFolder.create(wanted)
    assert [first.path.name, second.path.name] == ["mine", "mine-2"]
    second.write_config(wanted)
    assert "project_name: mine-2\n" in second.config.read_text()
    first.discard()
    assert os.listdir(tmp_path / "runs") == ["mine-2"]


@pytest.mark.parametrize("resumes", [False, True])
def test_the_folder_of_a_refused_run_goes(tmp_path: Path, resumes: bool) -> None:
    wanted = TrainConfig(output_dir=str(tmp_path), project_name="mine")
    with locked(RunFolder(tmp_path / "mine") if resumes else RunFolder.create(wanted)) as folder:
        assert folder.path.is_dir()
    assert os.listdir(tmp_path) == []


def test_records_hold_whatever_an_environment_returns_and_a_half_written_line_is_not_read(tmp_path: Path) -> None:
    record = {
        "nan": math.nan,
        "set": {1},
        "scalar": np.float32(0.5),
        "array": np.arange(2),
        "path": Path("x"),
        3: "key",
    }
    append_lines(tmp_path / "lines", [record, {"odd": object, "surrogate": "\ud800"}])
    with (tmp_path / "lines").open("a") as file:
        file.write('{"st')
    first, _ = read_lines(tmp_path / "lines")
    assert first == {"nan": None, "set": [1], "scalar": 0.5, "array": "[0 1]", "path": "x", "3": "key"}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


HOLDER = """
import os, signal, subprocess, sys
from pathlib import Path
from aitrain.runs.new_folder import LOCK_VARIABLE, locked
from aitrain.runs.run_folder import RunFolder
worker = '''
import os, sys, time
from aitrain.runs.new_folder import inherit_lock
inherit_lock()
left = os.fork()
if left == 0:
    time.sleep(600)
print(os.getpid(), left, flush=True)
sys.stdin.read()
'''
with locked(RunFolder(Path(sys.argv[1]))) as folder:
    folder.config.touch()
    inherited = {**os.environ, LOCK_VARIABLE: str(folder.lock)}
    subprocess.Popen([sys.executable, "-c", worker], env=inherited, pass_fds=[folder.lock])
    sys.stdin.read()
"""
"""A command with a training process whose environment leaves a process behind; it says the ids of both."""


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a command of this process waits for another one."""
    found = threading.Event()
    monkeypatch.setattr("aitrain.runs.new_folder.say_what_is_awaited", lambda folder: found.set())
    return found


def owned(folder: RunFolder) -> bool:
    """Wait for the folder; returns whether it was made."""
    with locked(folder) as mine:
        return mine.is_new


def test_a_command_waits_until_the_other_one_and_its_training_processes_have_ended(
    tmp_path: Path, awaited: threading.Event
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        worker, left = map(int, command.stdout.readline().split())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(owned, folder)
            assert awaited.wait(60)
            command.kill()
            command.wait()
            with (folder.path / LOCK).open() as file:
                assert lock_file(file.fileno()) is False  # the training process has it
            os.kill(worker, signal.SIGKILL)
            try:
                assert waiting.result(60) is False
            finally:
                os.kill(left, signal.SIGKILL)


def test_a_command_that_was_replaced_writes_nothing_more(tmp_path: Path) -> None:
    first = RunFolder(tmp_path).claimed(step=3)
    first.write_status("running", step=4)
    first.check_owner()
    second = RunFolder(tmp_path).claimed()
    first.write_status("finished", step=5)
    with pytest.raises(CannotWriteError, match="this one writes nothing more"):
        first.check_owner()
    second.check_owner()
    assert (read_object(second.status)["status"], read_object(second.status)["step"]) == ("running", 4)
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(CannotWriteError, match="moved or deleted"):
        second.check_owner()
