"""Checkpoints as files: how they come and go, and what a kill in the middle of it leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from aitrain.runs.checkpoint import (
    Manifest,
    checkpoints_of,
    clean_partial,
    damage_of,
    publish,
    rotate,
    seal,
    step_of,
)
from aitrain.runs.run_folder import RunFolder


class Killed(Exception):
    """Stands for a SIGKILL at some call."""


def filled(folder: RunFolder, step: int, weights: str = "1.5") -> Path:
    """A checkpoint that is written and sealed, and not in its place."""
    made = folder.checkpoints / f".saving-{step}" / f"checkpoint-{step}"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "weights").write_text(weights)
    seal(made, Manifest(step, {"lr": 1e-5}, {}, "cases", 1))
    return made


def put(folder: RunFolder, step: int, weights: str = "1.5") -> None:
    publish(filled(folder, step, weights), folder.checkpoints / f"checkpoint-{step}")


def steps(folder: RunFolder) -> list[int]:
    return [step_of(checkpoint) for checkpoint in checkpoints_of(folder)]


@pytest.mark.parametrize("call", range(3))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one_or_the_new_one(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first rename, before the second, and before the old one is deleted."""
    folder, calls = RunFolder(tmp_path), iter(range(3))
    put(folder, 4, "old")
    made = filled(folder, 4, "new")
    rename, rmtree = Path.rename, shutil.rmtree

    def renames(self: Path, target: Path) -> Path:
        if next(calls) == call:
            raise Killed
        return rename(self, target)

    def deletes(path: Path, ignore_errors: bool = False) -> None:
        if call == 2 and not made.exists():
            raise Killed
        rmtree(path, ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", renames)
        patched.setattr(shutil, "rmtree", deletes)
        with pytest.raises(Killed):
            publish(made, folder.checkpoints / "checkpoint-4")
    clean_partial(folder)

    assert os.listdir(folder.checkpoints) == ["checkpoint-4"]
    assert not damage_of(folder.checkpoints / "checkpoint-4")
    weights = (folder.checkpoints / "checkpoint-4" / "deep" / "weights").read_text()
    assert weights == ("new" if call == 2 else "old")


def test_a_foreign_link_or_pipe_in_a_checkpoint_is_damage_and_is_not_opened(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    seal(checkpoint, Manifest(1, {}, {}, "cases", 1))
    (checkpoint / "link").symlink_to("nothing")
    assert damage_of(checkpoint).startswith("link is missing, was changed or does not belong to it")
    (checkpoint / "link").unlink()
    os.mkfifo(checkpoint / "pipe")
    assert damage_of(checkpoint).startswith("pipe is missing, was changed or does not belong to it")


def test_what_a_killed_process_was_writing_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    put(folder, 4)
    filled(folder, 6)
    for name in ("metrics.jsonl", ".lock", ".notes"):
        (tmp_path / name).touch()
    (tmp_path / ".saving-model").mkdir()
    (tmp_path / "model").mkdir()

    clean_partial(folder)

    assert sorted(os.listdir(tmp_path)) == [".lock", ".notes", "checkpoints", "metrics.jsonl", "model"]
    assert os.listdir(folder.checkpoints) == ["checkpoint-4"]


def test_those_of_the_lowest_steps_go_and_the_best_is_kept_besides(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (10, 9, 8, 7, 100):
        put(folder, step)
    rotate(folder, 2, 8)
    assert steps(folder) == [100, 10, 8]
    rotate(folder, 1, None)
    assert steps(folder) == [100]
