"""What all benchmarks share: what a child process used, and what pairs of measurements come to."""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
PATIENCE = 60.0
"""Seconds that a child gets to end what it started, when the benchmark is interrupted."""


# -- children


@dataclass(frozen=True)
class Used:
    """What a child and its own children used: CPU time of all of them, memory of the largest one."""

    cpu_seconds: float
    peak_mib: float


def run(command: Sequence[str], exit_code: int | None = 0) -> Used:
    """Run it to its end; with None as `exit_code` it may have any.

    `ru_maxrss` starts at the size of the process that forks, so what measures must be smaller than what it measures:
    the benchmarks themselves never import torch.

    Raises:
        RuntimeError: it ended with another exit code than it should have.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            _end(child)
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        if exit_code not in (None, child.returncode):
            output.seek(0)
            said = output.read().decode(errors="replace")[-8000:]
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}, not {exit_code}:\n{said}")
    return Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT / 2**20)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def script(name: str) -> str:
    """A console script of the Python that runs this."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def options(description: str) -> argparse.ArgumentParser:
    """The command line that every benchmark has; a SIGTERM is taken like Ctrl-C, so that children are ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=positive, default=5, help="measure so many pairs (default: 5)")
    return parser


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


# -- pairs


@dataclass(frozen=True)
class Bounds:
    """What must hold: the median of ours by theirs, and where it matters the median of ours, are at most this."""

    ratio: float
    ours: float = math.inf

    def __str__(self) -> str:
        return f"ratio <= {self.ratio:g}" + (f", ours <= {self.ours:g}" if math.isfinite(self.ours) else "")


@dataclass(frozen=True)
class Row:
    """One measure of both sides, pair by pair; without bounds it is shown for information."""

    name: str
    ours: Sequence[float]
    theirs: Sequence[float]
    bounds: Bounds | None = None

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs, for each pair."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def is_met(self) -> bool:
        """Whether the bounds hold."""
        if self.bounds is None:
            return True
        within = statistics.median(self.ours) <= self.bounds.ours
        return within and statistics.median(self.ratios) <= self.bounds.ratio

    def cells(self) -> list[str]:
        """The row as the table shows it."""
        verdict = "" if self.bounds is None else f"{self.bounds}: {'ok' if self.is_met else 'NOT MET'}"
        return [self.name, *(spread(values) for values in (self.ours, self.theirs, self.ratios)), verdict]


def spread(values: Sequence[float]) -> str:
    """`0.203 (0.198..0.231)`: median, smallest and largest."""
    digits = 0 if min(values) >= 100 else 3
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}..{high})"


def show(rows: Sequence[Row], peer: str, ours: str = "aitrain") -> bool:
    """Print the table; returns whether all bounds are met."""
    head = ["median (min..max)", ours, peer, "ratio", "bound"]
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return all(row.is_met for row in rows)
