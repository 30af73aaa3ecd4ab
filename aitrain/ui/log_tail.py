"""Reads a log file as it grows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class LogTail:
    """Each call returns the lines written since the last call; for a progress bar (`\\r`), its last state."""

    path: Path
    done: int = 0

    def __call__(self) -> list[str]:
        """New complete lines."""
        try:
            with self.path.open("rb") as file:
                self.done = min(self.done, file.seek(0, os.SEEK_END))  # a log that is too long is cut
                file.seek(self.done)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.done += len(whole) + len(newline)
        lines = whole.decode("utf-8", errors="replace").split("\n") if newline else []
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]
