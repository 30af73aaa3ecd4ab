"""A sweep with scripted trials: `python -m tests.sweep.scripted FOLDER TRIAL STEP` plays one and is killed there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from aitrain.launch.search_space import read_space
from aitrain.launch.sweep import Sweep
from aitrain.launch.sweep_plan import SweepPlan
from aitrain.options.sweep import SweepConfig
from aitrain.runs.run_folder import to_json_object
from aitrain.runs.sweep_record import SWEEP_FILE, SweepRecord, Trial, TrialStatus

GOOD, BAD = 3e-4, 1e-7
OPTIONS = {"model": "tiny", "rl_env": "envs.arithmetic", "eval_strategy": "steps", "eval_steps": 5, "max_steps": 20}
PLANTED = {"lr": [BAD, GOOD], "lora_r": [4, 8, 16, 32]}
STEPS = (5, 10, 15)


def plan_of(folder: Path, **options: object) -> SweepPlan:
    """A sweep over the planted learning rates, with these options of it."""
    given = {"options": OPTIONS, "search": PLANTED, "trials": 8, **options}
    config = SweepConfig(project_name=folder.name, output_dir=str(folder.parent), **given)
    return SweepPlan(config, read_space(config.search))


def record_of(plan: SweepPlan) -> SweepRecord:
    """The sweep in its folder, or a new one."""
    if (plan.wanted_folder / SWEEP_FILE).exists():
        return plan.resumed()
    plan.wanted_folder.mkdir(parents=True)
    return SweepRecord(plan.wanted_folder, to_json_object(plan.config.written()), plan.trials)


def final_score(values: dict[str, object]) -> float:
    """The planted learning rate decides, the rank of the adapter is noise."""
    return (0.8 if values["lr"] == GOOD else 0.3) + int(str(values["lora_r"])) / 1000


def play(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
    """A trial whose score rises to its end."""
    for step in STEPS:
        if is_pruned(step, 0.2 + (final_score(trial.values) - 0.2) * step / 20):
            return "pruned"
    trial.score = final_score(trial.values)
    return "finished"


def sweep_of(folder: Path, play: Callable[..., TrialStatus] = play, **options: object) -> Sweep:
    """A scripted sweep, to be run."""
    plan = plan_of(folder, **options)
    return Sweep(plan, record_of(plan), play)


def main(folder: Path, dies_at: tuple[int, int]) -> None:
    """Play the sweep, and be killed in this trial at this step."""

    def killed(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        def report(step: int, score: float) -> bool:
            pruned = is_pruned(step, score)
            if (trial.number, step) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return pruned

        return play(trial, report)

    sweep_of(folder, killed, pruner="median").run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
