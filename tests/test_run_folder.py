"""Where a run's things lie, and that they are written whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.runs.run_folder import RunFolder, append_lines, keep_lines, read_lines, to_jsonable, write_text


def config(folder: Path, **options: str) -> TrainConfig:
    return TrainConfig(output_dir=str(folder / "runs"), **options)  # type: ignore[arg-type]


def test_a_folder_is_never_shared(tmp_path: Path) -> None:
    names = [RunFolder.create(config(tmp_path, project_name="mine")).path.name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]


def test_config_yaml_holds_the_name_that_the_run_got(tmp_path: Path) -> None:
    wanted = config(tmp_path, project_name="mine")
    RunFolder.create(wanted)
    second = RunFolder.create(wanted)
    second.write_config(wanted)
    assert "project_name: mine-2\n" in second.config.read_text()


def test_a_discarded_run_takes_the_folders_that_it_made_with_it(tmp_path: Path) -> None:
    folder = RunFolder.create(TrainConfig(output_dir=str(tmp_path / "a" / "b")))
    folder.discard()
    assert os.listdir(tmp_path) == []


def test_a_discarded_run_leaves_what_others_put_there(tmp_path: Path) -> None:
    first = RunFolder.create(config(tmp_path))
    RunFolder.create(config(tmp_path))
    first.discard()
    assert os.listdir(tmp_path / "runs") == ["project-name-2"]


def test_a_folder_that_cannot_be_made_is_a_wrong_command(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="--output-dir"):
        RunFolder.create(config(tmp_path))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_records_hold_whatever_an_environment_returns(tmp_path: Path) -> None:
    record = {
        "nan": float("nan"),
        "set": {1},
        "scalar": np.float32(0.5),
        "surrogate": "\ud800",
        "odd": object,
        3: "key",
    }
    append_lines(tmp_path / "lines", [record, {"array": np.arange(2)}])
    first, second = read_lines(tmp_path / "lines")
    assert first["nan"] is None
    assert first["set"] == [1]
    assert first["scalar"] == 0.5
    assert first["3"] == "key"
    assert second["array"] == "[0 1]"


def test_a_half_written_last_line_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"step": 1}\n{"st')
    assert list(read_lines(tmp_path / "lines")) == [{"step": 1}]
    assert list(read_lines(tmp_path / "none")) == []


def test_what_follows_a_checkpoint_is_forgotten(tmp_path: Path) -> None:
    append_lines(tmp_path / "lines", [{"step": step, "text": "ä\u2028"} for step in (1, 2, 3)])
    keep_lines(tmp_path / "lines", lambda record: record["step"] <= 2)
    assert [record["step"] for record in read_lines(tmp_path / "lines")] == [1, 2]


def test_plain_values_are_json() -> None:
    json.dumps(to_jsonable({"a": (1, 2.5, None, True), "b": {"c": Path("x")}, "d": float("inf")}), allow_nan=False)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.runs.run_folder.WAIT_FOR_OTHERS", 0.3)
    code = (
        "import sys, pathlib; from aitrain.runs.run_folder import RunFolder\n"
        f"with RunFolder(pathlib.Path({str(tmp_path)!r})).run_lock(): print('in', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(ConfigError, match="Another process runs in"), RunFolder(tmp_path).run_lock():
        pass
    other.kill()
    other.communicate()
    with RunFolder(tmp_path).run_lock():
        pass
