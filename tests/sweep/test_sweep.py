"""The trials of a sweep: which are played, which is best, what a kill, a failure or a second process changes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from aitrain.errors import ConfigError, RunFailed
from aitrain.launch.search_space import read_space
from aitrain.launch.sweep_study import propose
from aitrain.options.sweep import SweepConfig
from aitrain.runs.run_list import look
from aitrain.runs.sweep_record import SWEEP_FILE, SweepRecord, Trial, TrialStatus, sweep_lock
from aitrain.ui.run_rows import sweep_row
from tests.sweep.scripted import BAD, GOOD, plan_of, play, sweep_of

ROOT = Path(__file__).parents[2]
IsPruned = Callable[[int, float], bool]


def falls(trial: Trial, is_pruned: IsPruned) -> TrialStatus:
    """Each trial is worse than the one before it."""
    trial.steps = next((step for step in (1, 2, 4) if is_pruned(step, -float(trial.number))), None)
    trial.score = None if trial.steps else -float(trial.number)
    return "pruned" if trial.steps else "finished"


# -- killed and resumed


def test_a_sweep_that_is_killed_and_resumed_ends_as_one_that_was_not_and_finds_the_planted_value(
    tmp_path: Path,
) -> None:
    sweep_of(tmp_path / "whole", pruner="median").run()
    command = [sys.executable, "-m", "tests.sweep.scripted", str(tmp_path / "killed"), "6", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = SweepRecord.read(tmp_path / "killed")
    assert (killed.status, killed.trials[6].status, killed.trials[6].scores.keys()) == ("stopped", "running", {5})
    sweep_of(tmp_path / "killed", pruner="median").run()
    killed = SweepRecord.read(tmp_path / "killed")
    assert killed.trials == SweepRecord.read(tmp_path / "whole").trials
    assert killed.best is not None
    assert killed.best.values["lr"] == GOOD
    assert killed.status == "finished"
    assert {"finished", "pruned"} == {trial.status for trial in killed.trials}


@pytest.mark.parametrize("damage", [{"score": "high"}, {"values": [1]}, {"scores": [1]}, {"number": "x"}], ids=str)
def test_a_damaged_record_is_no_sweep_and_spoils_no_table(damage: dict[str, object], tmp_path: Path) -> None:
    SweepRecord(tmp_path, {}, 2, "finished", [Trial(0, {"lr": 1.0}, "finished", 0.5)]).write()
    values = json.loads((tmp_path / SWEEP_FILE).read_text())
    values["trials"][0] |= damage
    (tmp_path / SWEEP_FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="is not the folder of a sweep"):
        SweepRecord.read(tmp_path)
    assert (sweep_row(tmp_path)["status"], look(tmp_path).status) == ("unknown", "damaged")


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from aitrain.runs.sweep_record import sweep_lock\n"
        "with sweep_lock(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT) as other:
        assert other.stdout
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="Another"), sweep_lock(tmp_path):
            pass
        other.communicate("")
    with sweep_lock(tmp_path):
        pass


def test_a_resumed_sweep_must_be_the_same_but_for_the_number_of_trials(tmp_path: Path) -> None:
    sweep_of(tmp_path / "one", trials=2).run()
    sweep_of(tmp_path / "one", trials=3).run()
    assert len(SweepRecord.read(tmp_path / "one").trials) == 3
    with pytest.raises(ConfigError, match="search changed"):
        plan_of(tmp_path / "one", search={"lr": [1e-5, 1e-4]}).resumed()
    with pytest.raises(ConfigError, match="is not the folder of a sweep"):
        plan_of(tmp_path / "none").resumed()


# -- which values


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_finite_space_is_searched_without_trying_a_combination_twice(tmp_path: Path, sampler: str) -> None:
    sweep = sweep_of(tmp_path / "one", sampler=sampler, trials=20)
    sweep.run()
    tried = [tuple(trial.values.values()) for trial in sweep.record.trials]
    assert len(tried) == len(set(tried)) == 8
    assert sweep.record.best is not None
    assert sweep.record.best.values == {"lr": GOOD, "lora_r": 32}
    if sampler == "grid":
        assert tried[:5] == [(BAD, 4), (BAD, 8), (BAD, 16), (BAD, 32), (GOOD, 4)], "the order of the file"


def far_from_best(sampler: str, seed: int = 0, **more: object) -> list[Trial]:
    """Trials of a sampler whose score is the distance of their learning rate from the best one."""
    search = {"lr": {"low": 1e-7, "high": 1e-1, "log": True}, **more}
    config, space, trials = SweepConfig(search=search, sampler=sampler, seed=seed), read_space(search), list[Trial]()
    for number in range(20):
        values: Any = propose(config, space, trials)
        trials.append(Trial(number, values, "finished", score=-abs(math.log10(values["lr"] / GOOD))))
    return trials


def test_the_parzen_estimator_comes_closer_to_the_best_learning_rate_than_chance() -> None:
    distance = {
        sampler: fmean(-(trial.score or 0) for seed in range(5) for trial in far_from_best(sampler, seed)[10:])
        for sampler in ("tpe", "random")
    }
    assert distance["tpe"] < 0.7 * distance["random"]


def test_values_stay_on_their_steps_and_within_their_range() -> None:
    values: Any = [trial.values for trial in far_from_best("random", lora_r={"low": 4, "high": 30, "step": 8})]
    assert {one["lora_r"] for one in values} == {4, 12, 20, 28}
    assert len({one["lr"] for one in values if 1e-7 <= one["lr"] <= 1e-1}) == 20


# -- how trials end


def test_a_pruned_or_failed_trial_has_no_score_and_is_never_the_best(tmp_path: Path) -> None:
    def ends(trial: Trial, is_pruned: IsPruned) -> TrialStatus:
        if trial.number == 1:
            raise ConfigError("16 prompts x 7 completions cannot be divided")  # values that do not go together
        if trial.number == 2:
            is_pruned(5, 0.9)
            return "pruned"
        trial.score = -1.0 - trial.number
        return "finished"

    for direction, best in (("maximize", 0), ("minimize", 7)):
        sweep = sweep_of(tmp_path / direction, ends, direction=direction)
        sweep.run()
        assert [trial.number for trial in sweep.record.trials if trial.score is None] == [1, 2]
        failed = sweep.record.trials[1]
        assert (failed.status, failed.error) == ("failed", "16 prompts x 7 completions cannot be divided")
        assert sweep.record.best is sweep.record.ranked[0] is sweep.record.trials[best]
        assert [trial.score for trial in sweep.record.ranked[-2:]] == [None, None]


@pytest.mark.parametrize(
    ("pruner", "after_trials", "after_step", "ends"),
    [("none", 3, 0, [None] * 6), ("median", 3, 0, [None] * 3 + [1] * 3), ("halving", 3, 0, [None] * 2 + [1] * 4),
     ("median", 1, 2, [None] + [2] * 5)],
)  # fmt: skip
def test_a_pruner_ends_a_trial_that_is_behind_the_others(
    tmp_path: Path, pruner: str, after_trials: int, after_step: int, ends: list[int | None]
) -> None:
    options = {"prune_after_trials": after_trials, "prune_after_step": after_step, "trials": 6}
    sweep = sweep_of(tmp_path / "one", falls, pruner=pruner, **options)
    sweep.run()
    assert [trial.steps for trial in sweep.record.trials] == ends


def test_a_sweep_ends_when_its_first_three_trials_failed(tmp_path: Path) -> None:
    def fails(trial: Trial, _: object) -> TrialStatus:
        trial.error = "no module named hotel"
        return "failed"

    with pytest.raises(RunFailed, match=r"The first 3 trials have failed.*\ntrial-0: no module named hotel"):
        sweep_of(tmp_path / "one", fails).run()
    assert len(SweepRecord.read(tmp_path / "one").trials) == 3
    row = sweep_row(tmp_path / "one")
    assert (row["status"], row["reason"]) == ("failed", "no module named hotel")


def test_trials_at_the_same_time_are_all_different_and_recorded_with_their_values(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def waits(trial: Trial, is_pruned: IsPruned) -> TrialStatus:
        together.wait(60)
        return play(trial, is_pruned)

    sweep_of(tmp_path / "one", waits).run(parallel=4)
    record = SweepRecord.read(tmp_path / "one")
    assert [(trial.number, trial.status) for trial in record.trials] == [(number, "finished") for number in range(8)]
    assert len({json.dumps(trial.values) for trial in record.trials}) == 8
