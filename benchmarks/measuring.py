"""What all benchmarks share: what is asked of them, the figures that they give, and processes whose use is measured.

Each benchmark is a module with `measure(asked)`, which gives its figures; `python -m benchmarks` runs them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
PATIENCE = 60.0
"""Seconds that a child gets to end what it started, when the benchmark is interrupted."""

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What a benchmark is asked to do."""

    pairs: int = 5
    kills: int = 10
    """Of `torture`."""
    processes: int = 1
    """Of the run that `torture` kills."""
    is_short: bool = False
    """Only to see that it works: bounds may not be met."""


def figures_of(name: str, asked: Asked) -> list[Figure]:
    """What the benchmark of this name gives, measured in this process, without what trainings say."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return list(importlib.import_module(f"benchmarks.{name}").measure(asked))


# -- figures


@dataclass(frozen=True)
class Figure:
    """One value of each pair, and the bounds of their median; without bounds it is shown for information."""

    name: str
    values: Sequence[float]
    most: float = math.inf
    least: float = -math.inf
    is_each: bool = False
    """Whether each value must be within the bounds."""
    sides: str = ""
    """The medians of both sides, if the values are ratios."""

    @property
    def is_met(self) -> bool:
        """Whether the bounds hold."""
        judged = self.values if self.is_each else [statistics.median(self.values)]
        return all(self.least <= value <= self.most for value in judged)

    @property
    def bound(self) -> str:
        """The bounds in words."""
        if not math.isfinite(self.least):
            return f"at most {self.most:.3g}" if math.isfinite(self.most) else ""
        return f"{self.least:g} to {self.most:g}" if math.isfinite(self.most) else f"at least {self.least:g}"

    def row(self, benchmark: str) -> str:
        """The line of the table."""
        met = ("yes" if self.is_met else "NO") if self.bound else ""
        return table_row(benchmark, self.name, self.bound, spread(self.values), self.sides, met)


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], most: float = math.inf) -> Figure:
    """Ours by theirs, pair by pair."""
    values = [one / other for one, other in zip(ours, theirs, strict=True)]
    sides = " / ".join(number(statistics.median(side)) for side in (ours, theirs))
    return Figure(name, values, most, sides=sides)


def spread(values: Sequence[float]) -> str:
    """`0.203 (0.198..0.231)`: median, smallest and largest."""
    return f"{number(statistics.median(values))} ({number(min(values))}..{number(max(values))})"


def number(value: float) -> str:
    """Three decimals, of small numbers."""
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3f}"


def table_row(*cells: str) -> str:
    """Cells as wide as most of them are."""
    widths = (21, 55, 13, 24, 15, 3)
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


HEAD = table_row("benchmark", "figure", "bound", "median (min..max)", "ours / theirs", "met")


# -- processes


def in_new_process(work: Callable[..., T], *arguments: Any) -> T:
    """What this returns in a process of its own, so that this one stays small: see `run`. One that has imported torch
    already is forked.

    Raises:
        RuntimeError: it failed, and has said how.
    """
    new: Any = multiprocessing.get_context("fork" if "torch" in sys.modules else "spawn")
    ours, theirs = new.Pipe(duplex=False)
    process = new.Process(target=_answer, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        returned: T = ours.recv()
    except EOFError:
        raise RuntimeError("what was to be measured failed") from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    return returned


def _answer(line: Any, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it has started
    line.send(work(*arguments))


@dataclass(frozen=True)
class Used:
    """What a child and its own children used: CPU time of all of them, memory of the largest one."""

    cpu_seconds: float
    peak_mib: float


def run(command: Sequence[str], exit_code: int | None = 0) -> Used:
    """Run it to its end; with None as `exit_code` it may have any.

    `ru_maxrss` starts at the size of the process that forks, so what measures must be smaller than what it measures.

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
