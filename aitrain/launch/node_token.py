"""The secret by which the machines of a run know each other: from the environment, or a file in a folder they share."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aitrain.errors import ConfigError

TOKEN_VARIABLE = "AITRAIN_TOKEN"
"""Environment variable with the secret that the machines of a run share."""


@contextmanager
def shared_token(place: str, folder: Path) -> Iterator[str]:
    """The token on node 0: from the environment, else a new one in a file that only its owner can read, in the folder
    that holds the run folders, until the end of the block."""
    if token := os.environ.get(TOKEN_VARIABLE):
        yield token
        return
    token, file = secrets.token_hex(32), _token_file(place, folder)
    folder.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=folder, prefix=f"{file.name}.")  # of mode 600
    with os.fdopen(handle, "w") as new:
        new.write(token)
    os.replace(beside, file)
    try:
        yield token
    finally:
        file.unlink(missing_ok=True)


def read_token(place: str, folder: Path) -> str | None:
    """The token on another machine; None if it cannot be read, or not yet."""
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    with suppress(OSError):
        os.listdir(folder)  # makes NFS look for a file that was not there before
        return _token_file(place, folder).read_text() or None
    return None


def _token_file(place: str, folder: Path) -> Path:
    return folder / f".nodes-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def refused_token(place: str, folder: Path) -> ConfigError:
    """The error on a machine that node 0 does not accept."""
    has_own = TOKEN_VARIABLE in os.environ
    why = f"its {TOKEN_VARIABLE} is another one" if has_own else f"{folder} here has no file of its token"
    return ConfigError(
        f"nnodes: node 0 at {place} does not accept this machine: {why}\n"
        f"Set {TOKEN_VARIABLE} to the same secret on all machines"
        + ("." if has_own else ", or let --output-dir be a folder that all of them share.")
    )
