"""Writes a folder as a whole or not at all, and never over one that exists."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.runs.checkpoint import STAGING, sync_all
from aitrain.runs.run_folder import is_open_file, lock_file, sync


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `place` to fill, and rename it to `place` if the block ends without an error.

    What a killed process left there is deleted first.

    Raises:
        ConfigError: `place` exists or cannot be made, or another process is writing it.
    """
    partial = place.with_name(f"{STAGING}{place.name}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {place}: {error.strerror}\nChoose another folder with --out.") from None
    try:
        if lock_file(handle) is False:
            raise ConfigError(f"--out: another process is writing {place}\nWait for it, or choose another folder.")
        try:
            refuse_existing(place)
            _empty(partial)
            yield partial
            for path in partial.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors are written for their owner alone
            sync_all(partial)
            _rename(partial, place)
            sync(place.parent)
        finally:
            if is_open_file(handle, partial):
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(handle)


def refuse_existing(place: Path) -> None:
    """Raise ConfigError if there is anything at `place`, except an empty folder."""
    if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        return
    if os.path.lexists(place):
        raise ConfigError(f"--out: {place} exists, and is not overwritten\nDelete it, or choose another with --out.")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _rename(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)  # the system refuses a folder that is not empty
    except OSError:
        refuse_existing(place)
        raise
