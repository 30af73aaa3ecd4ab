"""A folder that is written as a whole or not at all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from aitrain.errors import ConfigError
from aitrain.execution.process_tree import on_stop_signals
from aitrain.options.train import TrainConfig
from aitrain.runs import run_folder
from aitrain.runs.new_folder import new_folder, new_run_folder
from tests.conftest import listing, write


def test_an_error_leaves_nothing_and_a_folder_that_appeared_in_the_meantime_is_kept(tmp_path: Path) -> None:
    def fill(*others: str) -> None:
        with new_folder(tmp_path / "out") as partial:
            write(partial, {"ours": "x"})
            write(tmp_path / "out", dict.fromkeys(others, "x"))
            if not others:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert listing(tmp_path) == []
    with pytest.raises(ConfigError, match="exists"):
        fill("theirs")
    assert listing(tmp_path) == ["out", "out/theirs"]


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "new" / "out"
    with new_folder(place) as partial:
        write(partial, {"first": "x"})
        (partial / "first").chmod(0o600)
        assert not place.exists()
    assert listing(tmp_path) == ["new", "new/out", "new/out/first"]
    assert (place / "first").stat().st_mode & 0o777 == 0o644


def test_ctrl_c_removes_a_run_folder_in_which_no_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_folder.write_json

    def interrupted(*arguments: object, **options: object) -> object:
        try:
            return original(*arguments, **options)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_folder, "write_json", interrupted)
    config = TrainConfig(output_dir=str(tmp_path / "runs"))
    with (
        on_stop_signals(signal.default_int_handler),
        pytest.raises(KeyboardInterrupt),
        new_run_folder(config) as folder,
    ):
        folder.claimed()
    assert listing(tmp_path) == ["runs"]
