"""A sweep of eight trials over two planted learning rates, killed again and again and resumed, against one left alone.

Both must find the better learning rate, and must have played the same trials with the same scores, none of them twice.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from aitrain.options.yaml_text import write_yaml
from aitrain.runs.sweep_record import SWEEP_FILE, SweepRecord, Trial
from benchmarks.measuring import ROOT, options, positive

GOOD, BAD = 6e-4, 1e-7
OPTIONS = {
    "model": "tiny", "rl_env": str(ROOT / "aitrain" / "envs" / "arithmetic.py"), "rl_prompts_per_step": 16,
    "rl_num_generations": 8, "batch_size": 128, "rl_max_new_tokens": 8, "rl_kl_coef": 0.0, "rl_loss_type": "dapo",
    "max_steps": 20, "eval_cases": 100, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps",
    "save_steps": 5,
}  # fmt: skip
SEARCH = {"lr": [BAD, GOOD], "max_grad_norm": [0.5, 1.0, 2.0, 4.0]}
LIVES = (8.0, 60.0)
"""Shortest and longest life of a sweep that is killed, in seconds."""


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start the sweep of a name, or continue it."""
    file = folder / f"{name}.yaml"
    values = {"project_name": name, "output_dir": str(folder), "options": OPTIONS, "search": SEARCH, "pruner": "median"}
    file.write_text(write_yaml({**values, "prune_after_trials": 2}))
    more = ["--resume"] if (folder / name / SWEEP_FILE).exists() else []
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "aitrain", "sweep", str(file), "--quiet", *more]
    return subprocess.Popen(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def finish(folder: Path, name: str) -> SweepRecord:
    """Let a sweep come to its end.

    Raises:
        RuntimeError: it failed.
    """
    if code := start(folder, name).wait():
        raise RuntimeError(f"the sweep {name} ended with {code}")
    return SweepRecord.read(folder / name)


def outcome(trial: Trial) -> tuple[object, ...]:
    """All of a trial but its time."""
    return trial.number, trial.values, trial.status, trial.score, trial.scores, trial.steps


def main() -> int:
    """Returns 1 if the sweeps differ, or one finds the worse learning rate."""
    parser: argparse.ArgumentParser = options(__doc__ or "")
    parser.add_argument("--kills", type=positive, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, folder = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        alone = finish(folder, "alone")
        for number in range(1, given.kills + 1):
            child = start(folder, "killed")
            try:
                child.wait(chance.uniform(*LIVES))
                break  # it has come to its end
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
            found = SweepRecord.read(folder / "killed") if (folder / "killed" / SWEEP_FILE).exists() else None
            print(f"kill {number} of {given.kills}: {len(found.trials) if found else 0} trials began", flush=True)
        killed = finish(folder, "killed")
        for trial in alone.ranked:
            print(f"{trial.name}  lr {trial.values['lr']}  {trial.status}  {trial.score}")
        is_found = all(one.best is not None and one.best.values["lr"] == GOOD for one in (alone, killed))
        is_equal = list(map(outcome, alone.trials)) == list(map(outcome, killed.trials))
        print(f"the better learning rate was {'' if is_found else 'not '}found by both")
        print(f"the trials are {'' if is_equal else 'not '}the same")
        return 0 if is_found and is_equal else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
