"""One trial as a run: what its events lead to, and what is done with what a killed sweep left of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aitrain.errors import ConfigError
from aitrain.events import Announce, Ended, Evaluated, Event, Failed
from aitrain.launch import trial_run
from aitrain.launch.preflight import RunPlan
from aitrain.launch.trial_run import TrialRuns, divide_gpus
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.sweep_record import Trial
from tests.sweep.scripted import GOOD, plan_of

INTERVAL = {"mean": 0.7, "low": 0.6, "high": 0.8, "count": 8}


def write_result(folder: Path, score: float | None = 0.7) -> None:
    scores: Any = {"sampled": {"before": None, "after": INTERVAL, "change": None}}
    status = "stopped" if score is None else "finished"
    Result(folder, status, 20, 3.0, 0.2, score, 0.3, 0.9, scores=scores).write()


class ScriptedProcesses:
    """In the place of the training processes: three scorings, then the end."""

    end: ClassVar[Failed | Ended] = Ended("finished", 20)
    plans: ClassVar[list[RunPlan]] = []

    def __init__(self, plan: RunPlan, folder: RunFolder, announce: Announce) -> None:
        self.folder, self.announce, self.stops = folder, announce, 0
        self.plans.append(plan)

    def stop(self) -> None:
        self.stops += 1

    def run(self) -> Failed | Ended:
        self.announce(Evaluated("before", 0.2, 0.3))
        for step in (5, 10):
            self.announce(Evaluated(f"step {step}", step / 100, step / 10))
            if self.stops:
                return Ended("stopped", step)
        self.announce(Evaluated("after", 0.7, 0.9))
        if self.end.status == "finished":
            write_result(self.folder.path)
        return self.end


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedProcesses]:
    monkeypatch.setattr(trial_run, "launcher_of", lambda _: ScriptedProcesses)
    monkeypatch.setattr(ScriptedProcesses, "plans", [])
    return ScriptedProcesses


def runs_in(folder: Path, **options: object) -> TrialRuns:
    folder.mkdir(exist_ok=True)
    events: list[Event] = []
    return TrialRuns(plan_of(folder, **options), folder, lambda trial: events.append)


def first_trial() -> Trial:
    return Trial(0, {"lr": GOOD, "lora_r": 8})


def no_pruning(step: int, score: float) -> bool:
    return False


def test_a_trial_is_a_run_in_the_folder_of_the_sweep_with_its_score_and_interval(
    started: type[ScriptedProcesses], tmp_path: Path
) -> None:
    trial, reported = first_trial(), list[tuple[int, float]]()
    assert runs_in(tmp_path / "one").play(trial, lambda *one: bool(reported.append(one))) == "finished"
    assert (trial.score, trial.before, trial.interval, trial.steps) == (0.7, 0.2, INTERVAL, 20)
    assert reported == [(5, 0.05), (10, 0.1)]
    (plan,) = started.plans
    assert (plan.config.lr, plan.config.lora_r, plan.config.max_steps) == (GOOD, 8, 20)
    assert RunFolder(tmp_path / "one" / "trial-0").report.exists()


def test_the_greedy_objective_compares_greedy_scores_and_a_trial_that_is_pruned_is_stopped(
    started: type[ScriptedProcesses], tmp_path: Path
) -> None:
    trial, reported = first_trial(), list[tuple[int, float]]()
    runs = runs_in(tmp_path / "one", objective="greedy")
    runs.play(trial, lambda *one: bool(reported.append(one)))
    assert (trial.score, trial.before) == (0.9, 0.3)
    assert reported == [(5, 0.5), (10, 1.0)]
    pruned = Trial(1, trial.values)
    assert runs.play(pruned, lambda step, score: step == 5) == "pruned"
    assert pruned.score is None


@pytest.mark.parametrize(
    ("end", "is_stopped", "status", "error"),
    [
        (Failed("The environment failed", 3), False, "failed", "The environment failed"),
        (Ended("stopped", 5), True, "stopped", "None"),
        (Ended("stopped", 5), False, "failed", "were there held-out cases?"),  # and is not scored 0
    ],
)
def test_a_trial_that_ends_without_a_score(
    started: type[ScriptedProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    end: Failed | Ended, is_stopped: bool, status: str, error: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(ScriptedProcesses, "end", end)
    trial, runs = first_trial(), runs_in(tmp_path / "one")

    def stops(step: int, score: float) -> bool:
        if is_stopped and step == 10:
            runs.stop()  # Ctrl-C
        return False

    assert runs.play(trial, stops) == status
    assert trial.score is None
    assert error in str(trial.error)


def test_a_trial_that_had_finished_when_the_sweep_was_killed_is_not_trained_again(
    started: type[ScriptedProcesses], tmp_path: Path
) -> None:
    runs, trial = runs_in(tmp_path / "one"), first_trial()
    (tmp_path / "one" / "trial-0").mkdir()
    write_result(tmp_path / "one" / "trial-0", 0.65)
    assert runs.play(trial, no_pruning) == "finished"
    assert trial.score == 0.65
    assert started.plans == []


def test_a_trial_without_a_checkpoint_begins_again_in_its_folder(
    started: type[ScriptedProcesses], tmp_path: Path
) -> None:
    runs, trial = runs_in(tmp_path / "one"), first_trial()
    (tmp_path / "one" / "trial-0").mkdir()
    (tmp_path / "one" / "trial-0" / "metrics.jsonl").write_text('{"step": 3}\n')
    assert runs.play(trial, no_pruning) == "finished"
    assert [plan.checkpoint for plan in started.plans] == [None]
    assert not (tmp_path / "one" / "trial-0" / "metrics.jsonl").exists()


def test_a_trial_with_a_checkpoint_is_resumed_from_it(
    started: type[ScriptedProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    checkpoint = tmp_path / "one" / "trial-0" / "checkpoints" / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr(trial_run, "newest_checkpoint", lambda run, notify: checkpoint)

    def refuse(config: Any, **_: object) -> RunPlan:
        given.append(config.resume_from_checkpoint)
        raise ConfigError("this is not the run that wrote it")

    monkeypatch.setattr(trial_run, "check", refuse)
    with pytest.raises(ConfigError):
        runs_in(tmp_path / "one").play(first_trial(), no_pruning)
    assert given == ["auto"]
    assert checkpoint.exists()


def test_a_trial_waits_for_the_processes_that_a_killed_sweep_left(
    started: type[ScriptedProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([True, True, False])
    monkeypatch.setattr(trial_run, "is_alive", lambda status: next(looks))
    monkeypatch.setattr(trial_run, "ORPHANS_EVERY", 0.0)
    runs = runs_in(tmp_path / "one")
    assert runs.play(first_trial(), no_pruning) == "finished"
    assert list(looks) == []
    monkeypatch.setattr(trial_run, "is_alive", lambda status: runs.stop() or True)  # Ctrl-C ends the wait
    assert runs.play(first_trial(), no_pruning) == "stopped"


def test_a_trial_trains_on_its_share_of_the_gpus_and_gives_it_back(
    started: type[ScriptedProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("aitrain.launch.preflight.check_resources", lambda *_: [])
    runs = runs_in(tmp_path / "one")
    with pytest.raises(ConfigError, match="--parallel 5: there are only 4 GPUs"):
        divide_gpus(("0", "1", "2", "3"), 5)
    runs.gpus = divide_gpus(("0", "1", "2", "3"), 2)
    assert runs.play(first_trial(), no_pruning) == "finished"
    assert [plan.gpus for plan in started.plans] == [("2", "3")]
    assert sorted(runs.gpus) == [("0", "1"), ("2", "3")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
