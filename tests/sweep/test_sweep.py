"""A sweep with scripted trials: what is tried, what is recorded, and what a kill, a stop or a failure changes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import create_trial

from aitrain.cli import main
from aitrain.launch import sweep
from aitrain.launch.sweep import SweepPlan, check_sweep
from aitrain.options.sweep import SweepConfig
from aitrain.ui import sweep_page
from aitrain.ui.overview import Overview
from aitrain.ui.sweep_page import best_trial, open_study
from tests.execution.waiting import eventually
from tests.sweep.scripted import BAD, GOOD

ROOT = Path(__file__).parents[2]
SCRIPTED = [sys.executable, "-P", str(ROOT / "tests" / "sweep" / "scripted.py")]
OPTIONS = {"model": "tiny", "rl_env": "envs.arithmetic", "eval_strategy": "steps", "eval_steps": 5, "max_steps": 20}
PLANTED = {"lr": [BAD, GOOD], "lora_r": [4, 8, 16, 32]}
FILE = ("sweep.yaml",)
Run = Callable[..., int]


def write_file(**changes: object) -> Path:
    """sweep.yaml in the working directory."""
    values = {"project_name": "lrs", "options": OPTIONS, "search": PLANTED, "trials": 8, **changes}
    path = Path("sweep.yaml")
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("sweep.yaml")` is `aitrain sweep` with scripted trials, `asked` of them in keywords. Its page is
    empty: to draw it after each trial takes longer than the trial."""
    monkeypatch.setattr(sweep, "COMMAND", SCRIPTED)
    monkeypatch.setattr(sweep_page, "sweep_page", lambda *_: "")

    def run_command(*arguments: str, **asked: object) -> int:
        monkeypatch.setenv("AITRAIN_TEST_TRIAL", json.dumps(asked))
        monkeypatch.setattr("sys.argv", ["aitrain", "sweep", *arguments])
        return main._run()

    return run_command


def states(folder: str = "runs/lrs") -> list[str]:
    return [trial.state.name for trial in open_study(Path(folder)).trials]


def starts(number: int) -> int:
    return len(Path(f"runs/lrs/trial-{number}/starts").read_text().splitlines())


# -- killed, stopped and resumed


def test_a_killed_sweep_is_resumed_without_losing_a_trial_and_ends_as_one_that_was_not(run: Run) -> None:
    write_file(project_name="whole")
    assert run(*FILE) == 0
    write_file()
    killed = multiprocessing.get_context("fork").Process(target=run, args=FILE, kwargs={"killed": "trial-4"})
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert (Overview(Path("runs/lrs")).status, states()[4:]) == ("dead", [])
    assert run("runs/lrs") == 0
    resumed, whole = (
        [(trial.params, trial.state, trial.value) for trial in open_study(Path("runs") / name).trials]
        for name in ("lrs", "whole")
    )
    assert resumed == whole
    assert [starts(number) for number in (3, 4)] == [1, 2]


def test_ctrl_c_stops_the_running_trial_which_is_resumed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(search={"lr": [GOOD, BAD], "lora_r": [4]}, sampler="grid")

    def press() -> None:
        begun = Path("runs/lrs/trial-1/starts")
        assert eventually(lambda: begun.exists() and begun.read_text())  # the file is there before its line is
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    assert run(*FILE, waits=[BAD]) == 130
    thread.join()
    assert "aitrain sweep runs/lrs" in capsys.readouterr().err
    assert (states(), Overview(Path("runs/lrs")).status) == (["COMPLETE"], "stopped")
    assert run("runs/lrs") == 0
    assert (states(), starts(0), starts(1)) == (["COMPLETE", "COMPLETE"], 1, 2)


def test_a_finished_sweep_is_continued_with_more_trials_also_where_it_was_moved(run: Run) -> None:
    write_file(trials=1)
    assert run(*FILE) == 0
    Path("runs/lrs").rename("moved")
    assert run("moved", "--trials", "3") == 0
    assert len(states("moved")) == 3
    assert run("moved") == 0
    assert not list(Path("runs").iterdir())
    assert len(states("moved")) == 3


def test_a_folder_without_a_sound_record_is_no_sweep(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(trials=1)
    Path("empty").mkdir()
    assert run("empty") == 2
    assert "is not the folder of a sweep" in capsys.readouterr().err
    assert run(*FILE) == 0
    Path("runs/lrs/optuna.log").write_text("{}\n")
    assert run("runs/lrs") == 2
    assert "runs/lrs/optuna.log is damaged" in capsys.readouterr().err
    assert Overview(Path("runs/lrs")).status == "finished"


# -- which values


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_finite_space_is_searched_without_trying_a_combination_twice(sampler: str) -> None:
    _, tried = asked(sampler, {**PLANTED, "epochs": [1, 2, 3]}, 24)
    assert asked(sampler, PLANTED, 9)[0].next_values([create_trial(value=0.0)] * 8) is None
    assert len(tried) == len({json.dumps(values) for values in tried}) == 24
    if sampler == "grid":
        assert [values["lora_r"] for values in tried[::3]] == [4, 8, 16, 32] * 2, "the order of the file"


def test_values_are_those_of_the_file() -> None:
    search = {
        "lora_r": {"low": 4, "high": 30, "step": 8}, "lr": {"low": 1e-6, "high": 1e-4, "log": True},
        "peft": [True, False], "rl_env_config": [{"cases": 9}, {"cases": 8}],
    }  # fmt: skip
    plan, tried = asked("tpe", search, 30)
    options = [plan.trial_options(values) for values in tried]
    assert {values["lora_r"] for values in options} == {4, 12, 20, 28}
    assert {values["peft"] for values in options} == {True, False}
    assert {json.dumps(values["rl_env_config"]) for values in options} == {'{"cases": 9}', '{"cases": 8}'}
    assert all(values["trl"]["top_entropy_quantile"] == 0.5 for values in options)
    assert all(1e-6 <= values["lr"] <= 1e-4 for values in options)


def asked(sampler: str, search: dict[str, Any], most: int) -> tuple[SweepPlan, list[dict[str, Any]]]:
    """The values of the trials of a sweep, of which those with a high learning rate are better."""
    options = {"model": "tiny", "rl_env": "envs.arithmetic", "trl": {"top_entropy_quantile": 0.5}}
    plan = check_sweep(SweepConfig(search=search, sampler=sampler, options=options, trials=most))
    study = optuna.create_study(direction="maximize")
    while len(study.trials) < most and (values := plan.next_values(study.trials)) is not None:
        study.add_trial(create_trial(params=values, distributions={**plan.space}, value=values["lr"]))
    return plan, [trial.params for trial in study.trials]


# -- how trials end


def test_the_end_shows_the_trials_the_best_one_and_what_to_do_next(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file()
    assert run(*FILE) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ["trial", "lr", "lora_r", "before", "score", "after", "training"]
    assert lines[1].split()[1:] == ["0.0003", "32", "0.200", "0.832", "[0.732,", "0.932]"]
    best = best_trial(open_study(Path("runs/lrs")))
    assert f"aitrain eval runs/lrs/trial-{best.number} --samples 8" in shown
    assert Path("runs/lrs/sweep.html").exists()
    row = Overview(Path("runs/lrs")).row()
    assert (row["before"]["mean"], row["after"]["mean"]) == (0.2, pytest.approx(0.832))
    assert run("sweep.yaml", "--json", "--trials", "2") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folder"] == "runs/lrs-2", "a second one of the name has a folder of its own"
    assert result["trials"][result["best"]]["score"] == max(trial["score"] for trial in result["trials"])


def test_trials_that_fail_have_no_score(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(search={"lr": [1e-1, GOOD, 1e-2, BAD], "lora_r": [4]}, sampler="grid", objective="greedy")
    assert run("sweep.yaml", failing=[1e-1], silent=[1e-2]) == 0
    shown, progress = capsys.readouterr()
    assert states() == ["FAIL", "COMPLETE", "FAIL", "COMPLETE"]
    assert "failed: no \\x1b[31mspace left\n" in shown
    assert "failed: text of a library\n" in shown
    assert "best: trial-3 with lr 1e-07" in shown, "the greedy score, which falls"
    assert "the same for all" not in progress
    assert "best so far 0.196 (trial-1)" in progress


def test_a_sweep_without_a_score_has_failed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(trials=2)
    assert run(*FILE, failing=[BAD, GOOD]) == 1
    assert "No trial has a score" in capsys.readouterr().out
