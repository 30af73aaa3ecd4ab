"""The trials of a sweep: which are played, which is best, what a kill, a failure or a second process changes."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.errors import ConfigError, RunFailed
from aitrain.launch.search_space import read_space
from aitrain.launch.sweep_study import propose
from aitrain.options.sweep import SweepConfig
from aitrain.runs.run_list import look
from aitrain.runs.sweep_record import SWEEP_FILE, SweepRecord, Trial, TrialStatus, sweep_lock
from aitrain.ui.run_rows import sweep_row
from tests.sweep.scripted import BAD, GOOD, PLANTED, plan_of, play, sweep_of

ROOT = Path(__file__).parents[2]


def trials_of(folder: Path) -> list[dict[str, object]]:
    return [dict(one) for one in json.loads((folder / "sweep.json").read_text())["trials"]]


# -- killed and resumed


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_resumed_ends_as_one_that_was_not_and_finds_the_planted_value(
    tmp_path: Path,
) -> None:
    whole = sweep_of(tmp_path / "whole", pruner="median")
    whole.run()
    for dies_at in (["0", "5"], ["6", "5"], []):
        command = [sys.executable, "-m", "tests.sweep.scripted", str(tmp_path / "killed"), *dies_at]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if dies_at else 0), done.stderr
    killed = SweepRecord.read(tmp_path / "killed")
    assert trials_of(tmp_path / "killed") == trials_of(tmp_path / "whole")
    assert killed.best is not None
    assert killed.best.values["lr"] == GOOD
    assert killed.status == "finished"
    played = (tmp_path / "killed" / "played").read_text().split()
    assert len(played) == len(set(played))
    assert {str(trial.number) for trial in killed.trials if trial.status == "finished"} <= set(played)
    assert {"finished", "pruned"} == {trial.status for trial in killed.trials}


def test_a_sweep_whose_process_is_gone_is_read_as_stopped(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.sweep.scripted", str(tmp_path / "one"), "1", "5"], cwd=ROOT, check=False
    )
    record = SweepRecord.read(tmp_path / "one")
    assert record.status == "stopped"
    assert [trial.status for trial in record.trials] == ["finished", "running"]
    assert record.trials[1].scores.keys() == {5}


@pytest.mark.parametrize(
    "damage",
    [{"score": "high"}, {"values": [1]}, {"scores": [1]}, {"number": "x"}, {"error": 3}, {"seconds": "1"}, None],
    ids=str,
)
def test_a_damaged_record_is_no_sweep_and_spoils_no_table(damage: dict[str, Any] | None, tmp_path: Path) -> None:
    trials = [Trial(0, {"lr": 1.0}, "finished", 0.5), Trial(1, {"lr": 2.0}, "finished", 0.25)]
    SweepRecord(tmp_path, {}, 2, "finished", trials).write()
    values = json.loads((tmp_path / SWEEP_FILE).read_text())
    values["trials"][0] = damage and {**values["trials"][0], **damage}
    (tmp_path / SWEEP_FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="is not the folder of a sweep"):
        SweepRecord.read(tmp_path)
    assert (sweep_row(tmp_path)["status"], look(tmp_path).status) == ("unknown", "damaged")


def test_a_trial_that_was_to_be_pruned_before_the_kill_is_not_played_again(tmp_path: Path) -> None:
    def play_once(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        if trial.number == 2:
            assert is_pruned(5, 0.0)
            raise KeyboardInterrupt
        return play(trial, is_pruned)

    sweep = sweep_of(tmp_path / "one", play_once, pruner="median", prune_after_trials=2)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    played: list[int] = []

    def play_rest(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        played.append(trial.number)
        return play(trial, is_pruned)

    sweep_of(tmp_path / "one", play_rest, pruner="median", prune_after_trials=2).run()
    assert played == [3, 4, 5, 6, 7]
    assert SweepRecord.read(tmp_path / "one").trials[2].status == "pruned"


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from aitrain.runs.sweep_record import sweep_lock\n"
        "with sweep_lock(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT) as other:
        assert other.stdout
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="Another `aitrain sweep` plays trials in"), sweep_lock(tmp_path):
            pass
        other.communicate("")
    with sweep_lock(tmp_path):
        pass


def test_a_resumed_sweep_must_be_the_same_but_for_the_number_of_trials(tmp_path: Path) -> None:
    sweep_of(tmp_path / "one", trials=2).run()
    sweep_of(tmp_path / "one", trials=3).run()
    assert len(SweepRecord.read(tmp_path / "one").trials) == 3
    with pytest.raises(ConfigError, match=r"search changed since the sweep in .* began"):
        plan_of(tmp_path / "one", search={"lr": [1e-5, 1e-4]}).resumed()
    with pytest.raises(ConfigError, match="is not the folder of a sweep"):
        plan_of(tmp_path / "none").resumed()


# -- which values


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_finite_space_is_searched_without_trying_a_combination_twice(tmp_path: Path, sampler: str) -> None:
    sweep = sweep_of(tmp_path / "one", sampler=sampler, trials=20)
    sweep.run()
    tried = [json.dumps(trial.values) for trial in sweep.record.trials]
    assert len(tried) == len(set(tried)) == 8
    assert sweep.record.status == "finished"
    assert sweep.record.best is not None
    assert sweep.record.best.values == {"lr": GOOD, "lora_r": 32}


def test_a_grid_goes_through_the_combinations_in_the_order_of_the_file(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "one", sampler="grid", trials=5)
    sweep.run()
    assert [tuple(trial.values.values()) for trial in sweep.record.trials] == [
        (BAD, 4), (BAD, 8), (BAD, 16), (BAD, 32), (GOOD, 4),
    ]  # fmt: skip


def test_the_parzen_estimator_comes_closer_to_the_best_learning_rate_than_chance() -> None:
    search = {"lr": {"low": 1e-7, "high": 1e-1, "log": True}}
    distance: dict[str, float] = {}
    for sampler in ("tpe", "random"):
        late = []
        for seed in range(5):
            config, space, trials = SweepConfig(search=search, sampler=sampler, seed=seed), read_space(search), []
            for number in range(20):
                values = propose(config, space, trials)
                assert values is not None
                off = abs(math.log10(float(str(values["lr"])) / GOOD))
                trials.append(Trial(number, values, "finished", score=-off))
            late += [-(trial.score or 0) for trial in trials[10:]]
        distance[sampler] = sum(late) / len(late)
    assert distance["tpe"] < 0.7 * distance["random"]


def test_values_stay_on_their_steps_and_within_their_range() -> None:
    search = {
        "rl_temperature": {"low": 0.5, "high": 1.2, "step": 0.1},
        "lora_r": {"low": 4, "high": 30, "step": 8},
        "lr": {"low": 1e-6, "high": 1e-4, "log": True},
        "peft": [True, False],
        "trl": {"num_iterations": [1, 2]},
    }
    config, space, trials = SweepConfig(search=search, sampler="random"), read_space(search), list[Trial]()
    for number in range(30):
        trials.append(
            Trial(number, propose(config, space, trials) or {}, "finished", score=random.Random(number).random())
        )
    assert {trial.values["lora_r"] for trial in trials} == {4, 12, 20, 28}
    assert {trial.values["rl_temperature"] for trial in trials} <= {0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}
    assert {trial.values["peft"] for trial in trials} == {True, False}
    assert {trial.values["trl.num_iterations"] for trial in trials} == {1, 2}
    assert all(1e-6 <= float(str(trial.values["lr"])) <= 1e-4 for trial in trials)
    assert len({trial.values["lr"] for trial in trials}) == 30


# -- how trials end


def test_a_pruned_or_failed_trial_has_no_score_and_is_never_the_best(tmp_path: Path) -> None:
    def ends(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        if trial.number == 1:
            trial.error = "The training process ended"
            return "failed"
        if trial.number == 2:
            is_pruned(5, 0.9)
            return "pruned"
        trial.score = -1.0 - trial.number
        return "finished"

    for direction, best in (("maximize", 0), ("minimize", 7)):
        sweep = sweep_of(tmp_path / direction, ends, direction=direction)
        sweep.run()
        assert [trial.number for trial in sweep.record.trials if trial.score is None] == [1, 2]
        assert sweep.record.best is sweep.record.trials[best]
        assert [trial.score for trial in sweep.record.ranked[-2:]] == [None, None]


@pytest.mark.parametrize(("pruner", "first"), [("none", None), ("median", 3), ("halving", 2)])
def test_a_pruner_ends_a_trial_that_is_behind_the_others(tmp_path: Path, pruner: str, first: int | None) -> None:
    def falls(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        for step in (1, 2, 4):
            if is_pruned(step, -float(trial.number)):
                return "pruned"
        trial.score = -float(trial.number)
        return "finished"

    sweep = sweep_of(tmp_path / "one", falls, pruner=pruner, prune_after_trials=3, trials=6)
    sweep.run()
    pruned = [trial.number for trial in sweep.record.trials if trial.status == "pruned"]
    assert pruned == ([] if first is None else list(range(first, 6)))


def test_the_median_pruner_waits_for_its_step(tmp_path: Path) -> None:
    def falls(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        ends = next((step for step in (1, 2, 4) if is_pruned(step, -float(trial.number))), None)
        trial.score = None if ends else 0.0
        trial.steps = ends
        return "pruned" if ends else "finished"

    sweep = sweep_of(tmp_path / "one", falls, pruner="median", prune_after_trials=1, prune_after_step=2, trials=3)
    sweep.run()
    assert [trial.steps for trial in sweep.record.trials] == [None, 2, 2]


def test_values_that_do_not_go_together_fail_their_trial_only(tmp_path: Path) -> None:
    def refuses(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        if trial.number == 0:
            raise ConfigError("rl_num_generations: 16 prompts x 7 completions cannot be divided")
        return play(trial, is_pruned)

    sweep = sweep_of(tmp_path / "one", refuses)
    sweep.run()
    assert [trial.status for trial in sweep.record.trials] == ["failed", *["finished"] * 7]
    assert sweep.record.trials[0].error == "rl_num_generations: 16 prompts x 7 completions cannot be divided"


def test_a_sweep_ends_when_its_first_three_trials_failed(tmp_path: Path) -> None:
    def fails(trial: Trial, _: object) -> TrialStatus:
        trial.error = "The environment cannot be loaded: no module named hotel"
        return "failed"

    sweep = sweep_of(tmp_path / "one", fails)
    with pytest.raises(RunFailed, match=r"The first 3 trials have failed.*\ntrial-0: The environment cannot be loaded"):
        sweep.run()
    assert len(SweepRecord.read(tmp_path / "one").trials) == 3
    row = sweep_row(tmp_path / "one")
    assert (row["status"], row["reason"]) == ("failed", "The environment cannot be loaded: no module named hotel")


def test_a_stopped_trial_is_played_again_when_the_sweep_is_resumed(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "one", lambda trial, _: "finished")

    def stops(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        if trial.number < 2:
            return play(trial, is_pruned)
        sweep.is_stopping = True
        return "stopped"

    sweep.play = stops
    sweep.run()
    assert [trial.status for trial in sweep.record.trials] == ["finished", "finished", "stopped"]
    assert sweep.record.status == "stopped"
    resumed = sweep_of(tmp_path / "one")
    resumed.run()
    assert [trial.status for trial in resumed.record.trials] == ["finished"] * 8


def test_trials_at_the_same_time_are_all_different_and_recorded(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def waits(trial: Trial, is_pruned: Callable[[int, float], bool]) -> TrialStatus:
        together.wait(30)
        return play(trial, is_pruned)

    sweep = sweep_of(tmp_path / "one", waits)
    sweep.run(parallel=4)
    record = SweepRecord.read(tmp_path / "one")
    assert [trial.number for trial in record.trials] == list(range(8))
    assert len({json.dumps(trial.values) for trial in record.trials}) == 8
    assert all(trial.status == "finished" for trial in record.trials)


def test_the_record_keeps_values_exactly(tmp_path: Path) -> None:
    search = {"rl_env_config": [{"a": 1}, {"a": [1, 2]}], "target_modules": ["q_proj", "all-linear"], **PLANTED}
    sweep = sweep_of(tmp_path / "one", search=search, trials=5)
    sweep.run()
    assert SweepRecord.read(tmp_path / "one").trials == sweep.record.trials
