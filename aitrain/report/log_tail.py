"""What is written to a log file, as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class LogTail:
    """Called, it returns the lines that were written since the last time; of one that was rewritten, the end of it."""

    path: Path
    done: int = 0

    def __call__(self) -> list[str]:
        """New lines; what is not ended by a newline yet waits for the next time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.done)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.done += len(whole) + len(newline)
        lines = whole.decode("utf-8", errors="replace").split("\n") if newline else []
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]
