"""Kills a run with SIGKILL at moments that chance chooses, resumes it each time, and compares it with one left alone.

A third of the kills wait for a checkpoint to be under way and strike inside it. Afterwards the weights must be the same
to the last bit, and metrics and rollouts complete and without doubles; at no time may a checkpoint be in its place that
is not whole.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from aitrain.runs.checkpoint import STAGING, checkpoints_of, damage_of
from aitrain.runs.records import read_metrics
from aitrain.runs.reproduction import compare_repetition
from aitrain.runs.run_folder import RunFolder
from benchmarks.measuring import ROOT, Asked, Figure

PATIENCE = 600.0
STEPS_A_KILL = 8


@dataclass
class Torture:
    """One run that is killed again and again, in `folder`/runs/killed."""

    folder: Path
    processes: int
    steps: int
    chance: random.Random
    survived: Counter[str] = field(default_factory=Counter)
    left_over: set[tuple[int, int]] = field(default_factory=set)
    """What earlier kills left half written, until the next life takes it away."""

    @property
    def run(self) -> RunFolder:
        """The folder of the run that is killed."""
        return RunFolder(self.folder / "runs" / "killed")

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """The command: a checkpoint a step, windows of two steps, each of them in two iterations."""
        settings = {
            "model": "tiny", "rl-env": str(ROOT / "aitrain" / "envs" / "arithmetic.py"), "project-name": name,
            "max-steps": self.steps,
            "rl-max-new-tokens": 4, "lr": 1e-3, "rl-kl-coef": 0, "eval-cases": 4, "eval-strategy": "steps",
            "eval-steps": 3, "save-strategy": "steps", "save-steps": 1, "num-processes": self.processes,
            "rl-prompts-per-step": 4, "batch-size": 4, "rl-updates-per-rollout": 2, "trl": "num_iterations=2",
        }  # fmt: skip
        flags = [f"--{flag}={value}" for flag, value in settings.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "aitrain", "grpo", *flags, *more],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip

    def finish(self, name: str, *more: str) -> None:
        """Let it come to its end.

        Raises:
            RuntimeError: it failed.
        """
        child = self.start(name, *more)
        said = child.communicate()[0].decode(errors="replace")
        if child.returncode:
            raise RuntimeError(f"the run {name} ended with {child.returncode}:\n{said}")

    def live_and_die(self, number: int) -> None:
        """One life: until a moment after training has begun, or until a checkpoint is under way."""
        is_first = not checkpoints_of(self.run)
        child = self.start("killed", *([] if is_first else ["--resume"]))
        try:
            moment = self._wait(child, inside_save=number % 3 == 0)
        finally:
            self._kill(child)
        self.survived[f"kills {'inside a save' if self._is_saving() else moment}"] += 1
        self.left_over = self._under_way()
        for checkpoint in checkpoints_of(self.run):  # whatever has the name of one is whole
            assert not damage_of(checkpoint)
            self.survived["checkpoints looked at"] += 1

    def _wait(self, child: subprocess.Popen[bytes], inside_save: bool) -> str:
        """Returns what the run was doing when its time came."""
        began, done, is_first = time.monotonic(), len(self._steps()), not checkpoints_of(self.run)
        if not is_first and not inside_save and self.chance.random() < 0.25:
            time.sleep(self.chance.uniform(0, 5))
            return "while starting"
        while len(checkpoints_of(self.run)) == 0 or (inside_save and not self._is_saving()):
            self._check_alive(child, began)
            time.sleep(0.002)
        if inside_save:
            time.sleep(self.chance.uniform(0, 0.03))
            return "just after a save"
        while len(self._steps()) <= done:
            self._check_alive(child, began)
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, 0.5))
        return "while training"

    def _check_alive(self, child: subprocess.Popen[bytes], began: float) -> None:
        if child.poll() is not None:
            said = child.stdout.read().decode(errors="replace") if child.stdout else ""
            raise RuntimeError(f"the run ended by itself, with {child.returncode}:\n{said}")
        if time.monotonic() - began > PATIENCE:
            raise RuntimeError(f"nothing has happened for {PATIENCE:.0f} seconds")

    def _is_saving(self) -> bool:
        return not self._under_way() <= self.left_over

    def _under_way(self) -> set[tuple[int, int]]:
        """The staging folders, each known by its inode and the moment at which it was changed."""
        try:
            found = [folder.stat() for folder in self.run.checkpoints.glob(f"{STAGING}*")]
        except FileNotFoundError:  # it has become a checkpoint meanwhile
            return self._under_way()
        return {(one.st_ino, one.st_mtime_ns) for one in found}

    def _steps(self) -> list[int]:
        return [line.step for line in read_metrics(self.run.metrics)]

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        """Everything at once: parent and training processes."""
        below = psutil.Process(child.pid).children(recursive=True)
        child.kill()
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        child.communicate()


def measure(asked: Asked) -> Iterator[Figure]:
    """One run that is left alone, and one that is killed."""
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        torture = Torture(Path(place), asked.processes, asked.kills * STEPS_A_KILL, random.Random(0))
        torture.finish("alone")
        for number in range(1, asked.kills + 1):
            torture.live_and_die(number)
        torture.finish("killed", "--resume")
        compared = compare_repetition(RunFolder(torture.folder / "runs" / "alone"), torture.run)
        found = [f"{name}: {about}" for name, (same, about) in compared.parts.items() if same != "the same bits"]
    print(*found, sep="\n", end="", file=sys.__stderr__)
    yield Figure(f"differences after {asked.kills} kills", [len(found)], most=0)
    for moment, count in sorted(torture.survived.items()):
        yield Figure(moment, [count])
