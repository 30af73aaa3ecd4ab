"""How much longer the demo takes beside other programs: `python -m benchmarks.busy [--pairs N] [--steps N]`.

Each pair runs the demo alone, and beside two programs that compute all the time. On two cores a program that shares
them fairly takes up to 1.5 times as long with one thread, and 2 times with two; threads that spin while they wait for
each other take much longer. All programs are bound to the same two cores. Exits 1 when the bound is not met.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aitrain.cli.demo import SETTINGS
from benchmarks.measuring import Bounds, Row, options, positive, run, script, show

CORES = 2
BOUND = Bounds(ratio=2.5)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Programs that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of_demo(steps: int) -> float:
    """Seconds that the demo takes, from its start to its report."""
    with tempfile.TemporaryDirectory(prefix="aitrain-busy-") as folder:
        config = Path(folder) / "demo.yaml"
        config.write_text(json.dumps({**SETTINGS, "max_steps": steps, "output_dir": folder}), encoding="utf-8")
        start = time.monotonic()
        run([script("aitrain"), "grpo", "--config", str(config), "--quiet"])
        return time.monotonic() - start


def main() -> int:
    """Measure the pairs; returns the exit code."""
    parser = options("The demo beside two busy programs, by the demo alone.")
    parser.add_argument("--steps", type=positive, default=SETTINGS["max_steps"], help="steps of the demo (default: 80)")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    alone, beside = list[float](), list[float]()
    for _ in range(given.pairs):
        alone.append(seconds_of_demo(given.steps))
        with busy_loops(CORES):
            beside.append(seconds_of_demo(given.steps))
    return 0 if show([Row("seconds of the demo", beside, alone, BOUND)], "alone", "beside two loops") else 1


if __name__ == "__main__":
    sys.exit(main())
