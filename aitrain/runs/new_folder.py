"""Folders that one command at a time writes: a run folder, which is locked, and a folder that is made as a whole."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import STAGING, sync_all
from aitrain.runs.run_folder import RunFolder, cannot_make, read_object, sync

LOCK = ".lock"
LOCK_VARIABLE = "AITRAIN_LOCK"
"""Environment variable with the file descriptor of the lock that a training process inherits."""


def lock_file(handle: int, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool | None:
    """Lock an open file; False if another process has the lock, None if the file system has no locks."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open_file(handle: int, path: Path) -> bool:
    """Whether the name is still that of the file or folder that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


# -- run folders


@contextmanager
def locked(folder: RunFolder) -> Iterator[RunFolder]:
    """Keep other commands out of a run folder until the block ends. It is made if it is missing, and removed at the end
    if no run began in it.

    Waits for a command that has it, after saying so. The training processes inherit the lock: if this process is
    killed, it lasts until the last of them has ended.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    file = folder.path / LOCK
    while True:
        try:
            is_new = folder.is_new or not folder.path.exists()
            folder.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise cannot_make(folder.path.parent, error.strerror) from None
        _locks.add(handle)
        try:
            has_lock = lock_file(handle)
            if has_lock is False:
                say_what_is_awaited(folder)
                has_lock = lock_file(handle, fcntl.LOCK_EX)
            if not is_open_file(handle, file):
                continue  # the command that had it has removed the folder, as nothing began there
            is_new = is_new and not folder.config.exists()
            mine = replace(folder, is_new=is_new, lock=handle if has_lock else None)
            try:
                yield mine
            finally:
                if not mine.status.exists():  # nothing has begun
                    file.unlink(missing_ok=True)
                    mine.discard()
            return
        finally:
            _locks.discard(handle)
            os.close(handle)


def say_what_is_awaited(folder: RunFolder) -> None:
    """Say on the terminal that another command has a folder."""
    print(f"Another command runs in {folder.path}: waiting for its end. Ctrl-C ends the wait.", file=sys.stderr)


_locks: set[int] = set()
"""File descriptors of the locks of this process."""


def inherit_lock() -> None:
    """Keep the lock that the parent passed on, and pass it on to no other program."""
    if handle := os.environ.pop(LOCK_VARIABLE, None):
        os.set_inheritable(int(handle), False)
        _locks.add(int(handle))


def _drop_locks() -> None:
    """Called in forked processes: one of the environment's that outlives the run would keep its folder locked."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_drop_locks)


@contextmanager
def new_run_folder(config: TrainConfig) -> Iterator[RunFolder]:
    """A folder of `RunFolder.create`, locked until the block ends.

    Raises:
        ConfigError: it cannot be made or written.
    """
    while True:
        with ExitStack() as stack:
            folder = stack.enter_context(locked(RunFolder.create(config)))
            if folder.config.exists():
                continue  # a command with --resume was faster
            try:
                yield folder
            except KeyboardInterrupt:
                if not folder.log.exists():  # no training process was started
                    folder.discard()
                raise
            return


def remarks(folder: RunFolder, wanted: str) -> Iterator[str]:
    """What a user must know of a locked folder: that it has another name than they wanted, or no lock."""
    if folder.is_new and folder.path.name != wanted:
        first = folder.path.with_name(wanted)
        yield f"{first} exists, so this is {folder.path}. To continue the first one: resume_from_checkpoint (--resume)."
    if folder.lock is None:
        yield (
            f"{folder.path} is on a file system without locks: a second command for it would not wait, and end this"
            " one. Start one at a time."
        )


def refuse_to_begin(folder: RunFolder, damaged: Sequence[str]) -> None:
    """Refuse a folder without a whole checkpoint that has what a run from the beginning would overwrite.

    Raises:
        ConfigError: it has.
    """
    if damaged:
        what = f"there is no complete checkpoint in {folder.checkpoints}\n" + "\n".join(damaged[:2])
    elif read_object(folder.result).get("status") == "finished":
        what = f"{folder.path} has finished, and has no checkpoint to continue from"
    elif not folder.config.exists() and {*folder.path.glob("[!.]*")} - {folder.status}:
        what = f"{folder.path} is not a run folder"
    elif read_object(folder.status).get("job") is not None:
        what = f"{folder.path} is an eval"
    else:
        return
    raise ConfigError(
        f"resume_from_checkpoint: {what}\n"
        "Choose a run with --project-name and --output-dir, or omit this option to start a new one."
    )


# -- folders that are made as a whole


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `place` to fill, and rename it to `place` if the block ends without an error.

    Raises:
        ConfigError: `place` exists or cannot be made.
    """
    refuse_existing(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{STAGING}{place.name}-"))
    except OSError as error:
        raise ConfigError(f"--out: cannot make {place}: {error.strerror}\nChoose another folder with --out.") from None
    try:
        yield partial
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors are written for their owner alone
        sync_all(partial)
        refuse_existing(place)
        partial.rename(place)  # the system refuses a folder that is not empty
        sync(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(place: Path) -> None:
    """Raise ConfigError if there is anything at `place`, except an empty folder."""
    if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        return
    if os.path.lexists(place):
        raise ConfigError(f"--out: {place} exists, and is not overwritten\nDelete it, or choose another with --out.")
